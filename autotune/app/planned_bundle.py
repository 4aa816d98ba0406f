"""Writes the bundle of a plan, which says in each of its files that nothing of it was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autotune.app.options import Options
from autotune.app.planned import Planned
from autotune.app.servers import longest_sequence, split_problem
from autotune.app.workload import WorkloadReader, fixed_peft
from autotune.core.bundle import SCHEMA, Basis, PlannedBundle
from autotune.core.candidate import Candidate
from autotune.core.estimate import Estimate
from autotune.core.vllm import ServerSplit
from autotune.core.workload import DatasetSource, Workload
from autotune.emit.bundle import PLAN, remove_planned_bundle, write_planned_bundle
from autotune.emit.files import check_writable
from autotune.emit.planned import planned as handover_of
from autotune.emit.rows import copies_rows
from autotune.emit.serving import asking
from autotune.errors import InputError
from autotune.inspection.dataset import check_one_load
from autotune.inspection.machine import environment
from autotune.techniques.vllm import NAME as VLLM
from autotune.techniques.vllm import SERVER
from autotune.trainers.problem import TrainerProblem

_CHOOSE = "Choose another --output."


class _NothingToWriteError(Exception):
    """No training of the plan can be handed over; the message says why, without a full stop."""


def bundle_folder(output: str | Path, rows: DatasetSource | None, evaluation: DatasetSource | None) -> Path:
    """Return the absolute path of the folder for a bundle, which is not made yet.

    Raises:
        InputError: there are no rows that ``trl`` could load, or the folder holds something else than such a bundle or
            cannot be written.
    """
    folder = Path(output).expanduser().absolute()
    if rows is None:
        raise InputError(
            "A bundle names the rows to train on, and --seq-len names none.", hint="Give a DATASET, or no --output."
        )
    if evaluation is not None:
        check_one_load(rows, evaluation)
    try:
        found = {entry.name for entry in folder.iterdir()} if folder.exists() else set()
    except OSError as error:
        raise InputError(f"The output directory {folder} cannot be used: {error.strerror}.", hint=_CHOOSE) from error
    if found and PLAN not in found:
        raise InputError(f"The output directory {folder} holds other files and no plan of autotune.", hint=_CHOOSE)
    check_writable(folder)
    return folder


@dataclass(frozen=True)
class _Chosen:
    """The training that is handed over; figures as in :class:`PlannedBundle`."""

    problem: TrainerProblem
    candidate: Candidate
    needed_bytes: int
    error: float
    spare_bytes: int
    rate: float | None = None
    split: ServerSplit | None = None
    why: str = ""


@dataclass(frozen=True)
class PlanWriter:
    """Writes the bundle of one plan.

    Attributes:
        folder: as :func:`bundle_folder` returns it.
        server_gpus: GPUs that the user gives a vLLM server; None: as few as fit, where one is fixed.
        settings: of the plan.
        reader: reads the rows again where a bundle needs a copy of them, which are not kept.
    """

    folder: Path
    problem: TrainerProblem
    options: Options
    planned: Planned
    budget_bytes: int
    server_gpus: int | None
    settings: Mapping[str, object]
    reader: WorkloadReader

    def write(self, best: Sequence[Estimate], servers: Sequence[ServerSplit]) -> tuple[PlannedBundle | None, str]:
        """Write the bundle of a split where a server is wanted on some of the GPUs, else that of the fastest.

        Return what was written. Where nothing fits, that is None, with the reason; an earlier plan's files are removed.

        Args:
            best: the best estimate with all GPUs, if there is one.
            servers: the splits of the plan.

        Raises:
            InputError: the folder cannot be written.
        """
        try:
            chosen = self._of_splits(servers) if self._serves(servers) else self._of_fastest(best)
        except _NothingToWriteError as error:
            remove_planned_bundle(self.folder)
            return None, str(error)
        return self._written(chosen), ""

    def _written(self, chosen: _Chosen) -> PlannedBundle:
        problem = chosen.problem
        workload, hardware = problem.setting.workload, problem.setting.machine.hardware
        plan = problem.trainer.plan(chosen.candidate, problem.setting)
        document = PlannedBundle(
            schema=SCHEMA,
            basis=Basis.PLANNED,
            directory=str(self.folder),
            trainer=problem.trainer.name,
            model=workload.model.name,
            dataset=workload.dataset.name,
            device=self.planned.described.name,
            processes=hardware.processes,
            budget_bytes=self.budget_bytes,
            global_batch_size=problem.setting.global_batch_size,
            candidate=chosen.candidate,
            plan=asking(plan) if chosen.split is not None else plan,
            why=chosen.why,
            needed_bytes=chosen.needed_bytes,
            error=chosen.error,
            spare_bytes=chosen.spare_bytes,
            tokens_per_second=chosen.rate,
            server=chosen.split,
            environment=environment(self.planned.machine),
            settings=self.settings,
        )
        here = self.planned.gpu is None or self.planned.host_bytes is not None
        given = handover_of(
            document,
            self._with_rows(workload) if copies_rows(workload, plan) else workload,
            hardware,
            max_tokens=longest_sequence(chosen.candidate, problem),
            threads=hardware.threads if here else None,
        )
        write_planned_bundle(document, given, self.folder)
        return document

    def _serves(self, servers: Sequence[ServerSplit]) -> bool:
        return bool(servers) and (self.server_gpus is not None or self.options.wishes.fixed.get(VLLM) == SERVER)

    def _of_fastest(self, best: Sequence[Estimate]) -> _Chosen:
        fastest = next((each for each in best if each.fits), None)
        if fastest is None or fastest.memory is None or fastest.spare_bytes is None:
            raise _NothingToWriteError("nothing is predicted to fit")
        memory = fastest.memory
        return _Chosen(
            self.problem,
            fastest.candidate,
            memory.device_bytes,
            memory.error,
            fastest.spare_bytes,
            fastest.tokens_per_second,
        )

    def _of_splits(self, servers: Sequence[ServerSplit]) -> _Chosen:
        split = next((each for each in servers if each.fits), None)
        if split is None or split.candidate is None:
            reasons = (f": {each.reason}" for each in servers if each.reason)
            raise _NothingToWriteError(f"no split of the GPUs is predicted to fit{next(reasons, '')}")
        why = f"The server has {split.generation} of the GPUs, as --server-gpus says"
        if self.server_gpus is None:
            why = (
                "Of the splits that fit, it gives the server the fewest GPUs: how long vLLM generates is not known, so"
                " nothing says which is the fastest, and --server-gpus writes another"
            )
        return _Chosen(
            split_problem(self.problem, self.options, split.generation),
            split.candidate,
            split.training_bytes,
            split.training_error,
            split.training_spare_bytes,
            split=split,
            why=f"{why}.",
        )

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
            fixed_peft(self.options),
        )
        return replace(workload, dataset=again.dataset, evaluation=again.evaluation)
