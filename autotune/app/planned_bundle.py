"""Writes the bundle of a plan; each of its files states that nothing was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autotune.app.servers import longest_sequence
from autotune.app.workload import WorkloadReader
from autotune.core.bundle import SCHEMA, Basis, PlannedBundle, ServerSplit
from autotune.core.candidate import Choice
from autotune.core.estimate import Estimate, MemoryEstimate
from autotune.core.workload import DatasetSource, Workload
from autotune.emit.bundle import remove_planned_bundle, write_planned_bundle
from autotune.emit.figures import planned as handover_of
from autotune.emit.files import check_writable
from autotune.emit.rows import copies_rows
from autotune.emit.serving import with_server_address
from autotune.errors import InputError
from autotune.inspection.dataset import check_one_load
from autotune.inspection.machine import environment
from autotune.inspection.paths import user_path
from autotune.planning.evaluator import Evaluator
from autotune.userconfig.bundle import holds_planned_bundle

_CHOOSE = "Choose another --output."


def bundle_folder(output: str | Path, rows: DatasetSource | None, evaluation: DatasetSource | None) -> Path:
    """Return the absolute path of the folder for a bundle, which is not made yet.

    Raises:
        InputError: there are no rows that ``trl`` could load, or the folder holds something else than such a bundle or
            cannot be written.
    """
    folder = user_path(output).absolute()
    if rows is None:
        raise InputError(
            "A bundle names the rows to train on, and --seq-len names none.", hint="Give a DATASET, or no --output."
        )
    if evaluation is not None:
        check_one_load(rows, evaluation)
    try:
        found = folder.exists() and any(folder.iterdir())
    except OSError as error:
        raise InputError(f"The output directory {folder} cannot be used: {error.strerror}.", hint=_CHOOSE) from error
    if found and not holds_planned_bundle(folder):
        raise InputError(f"The output directory {folder} holds other files and no plan of autotune.", hint=_CHOOSE)
    check_writable(folder)
    return folder


@dataclass(frozen=True)
class PlanWriter:
    """Writes the bundle of one plan.

    Attributes:
        folder: as :func:`bundle_folder` returns it.
        evaluator: of the training, without the GPUs of a server.
        settings: of the plan.
        reader: reads the rows again where a bundle needs a copy of them, which are not kept.
        peft: the PEFT configuration of the training.
    """

    folder: Path
    evaluator: Evaluator
    settings: Mapping[str, object]
    reader: WorkloadReader
    peft: Choice

    def write(
        self, best: Sequence[Estimate], split: ServerSplit | str | None
    ) -> tuple[PlannedBundle | None, str, InputError | None]:
        """Write the bundle of the fastest training that is predicted to fit.

        Return what was written. Where nothing was, that is None, with the reason, and the failure if the folder cannot
        be written; where nothing fits or could be predicted, an earlier plan's files are removed.

        Args:
            best: the best estimate, if there is one.
            split: the vLLM server, or why vLLM does not start; None without a server.
        """
        fastest = next((each for each in best if each.fits), None)
        try:
            if fastest is None or fastest.memory is None or fastest.spare_bytes is None or isinstance(split, str):
                remove_planned_bundle(self.folder)
                return None, split if isinstance(split, str) else self._why_nothing(best), None
            return self._written(fastest, fastest.memory, fastest.spare_bytes, split), "", None
        except InputError as error:
            return None, error.message.rstrip("."), error

    def _why_nothing(self, best: Sequence[Estimate]) -> str:
        if any(each.memory is not None for each in best):
            return "nothing is predicted to fit"
        return f"nothing could be predicted: {self.evaluator.why_unknown.rstrip('.')}"

    def _written(
        self, fastest: Estimate, memory: MemoryEstimate, spare_bytes: int, split: ServerSplit | None
    ) -> PlannedBundle:
        problem = self.evaluator.problem
        workload, planned = problem.setting.workload, problem.setting.machine
        plan = problem.trainer.plan(fastest.candidate, problem.setting)
        document = PlannedBundle(
            schema=SCHEMA,
            basis=Basis.PLANNED,
            directory=str(self.folder),
            trainer=problem.trainer.name,
            model=workload.model.name,
            dataset=workload.dataset.name,
            device=planned.device.name,
            processes=planned.hardware.processes,
            budget_bytes=self.evaluator.budget_bytes,
            global_batch_size=problem.setting.global_batch_size,
            candidate=fastest.candidate,
            plan=with_server_address(plan) if split is not None else plan,
            needed_bytes=memory.device_bytes,
            error=memory.error,
            spare_bytes=spare_bytes,
            tokens_per_second=fastest.tokens_per_second,
            server=split,
            environment=environment(planned),
            settings=self.settings,
        )
        here = planned.gpu is None or planned.host_bytes is not None
        given = handover_of(
            document,
            self._with_rows(workload) if copies_rows(workload, plan) else workload,
            planned.hardware,
            max_tokens=longest_sequence(fastest.candidate, problem),
            threads=planned.hardware.threads if here else None,
        )
        write_planned_bundle(document, given, self.folder)
        return document

    def _with_rows(self, workload: Workload) -> Workload:
        """Return the workload with its tokenised rows; one that was kept from an earlier plan has none."""
        if Path(workload.dataset.tokenized_directory).is_dir():
            return workload
        again = self.reader.read(
            workload.trainer,
            workload.model_source,
            workload.dataset_source,
            workload.evaluation_source,
            workload.rollouts,
            self.peft,
        )
        return replace(workload, dataset=again.dataset, evaluation=again.evaluation)
