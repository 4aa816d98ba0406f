"""Writes the bundle of a plan (``autotune plan --output``), whose files state that nothing was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from autotune.app.servers import longest_sequence
from autotune.core.documents.bundle import Basis, PlannedBundle, ServerSplit
from autotune.core.documents.estimate import Estimate
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
from autotune.reporting.plan import doubts
from autotune.userconfig.bundle import holds_planned_bundle

_CHOOSE = "Choose another --output."


def bundle_folder(output: str | Path, rows: DatasetSource | None, evaluation: DatasetSource | None) -> Path:
    """Return the absolute path of the folder for a bundle, without creating it.

    Raises:
        InputError: there are no rows that ``trl`` could load, or the folder holds other files or cannot be written.
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


def write_plan(
    folder: Path,
    evaluator: Evaluator,
    best: Sequence[Estimate],
    split: ServerSplit | str | None,
    settings: Mapping[str, object],
    read_workload: Callable[[], Workload],
) -> PlannedBundle | str:
    """Write the bundle of the fastest training that is predicted to fit, and return it.

    If nothing fits or could be predicted, return the reason and remove an earlier plan's files.

    Args:
        folder: as :func:`bundle_folder` returns it.
        evaluator: the evaluator of the training, without the GPUs of a server.
        best: the best estimate, if there is one.
        split: the split of the GPUs with a vLLM server, or why vLLM does not start; None without a server.
        settings: the plan's arguments that differ from their defaults.
        read_workload: reads the dataset again for the tokenised rows, which a cached workload lacks.

    Raises:
        InputError: the folder cannot be written.
    """
    fastest = next((each for each in best if each.fits), None)
    if fastest is None or fastest.memory is None or fastest.spare_bytes is None or isinstance(split, str):
        remove_planned_bundle(folder)
        return split if isinstance(split, str) else _why_nothing(evaluator, best)
    problem = evaluator.problem
    workload, planned = problem.setting.workload, problem.setting.machine
    plan = problem.trainer.plan(fastest.candidate, problem.setting)
    if copies_rows(workload, plan) and not Path(workload.dataset.tokenized_directory).exists():
        workload = read_workload()
    document = PlannedBundle(
        basis=Basis.PLANNED,
        directory=str(folder),
        trainer=problem.trainer.name,
        model=workload.model.name,
        dataset=workload.dataset.name,
        device=planned.device.name,
        processes=planned.hardware.processes,
        budget_bytes=evaluator.budget_bytes,
        global_batch_size=problem.setting.global_batch_size,
        candidate=fastest.candidate,
        plan=with_server_address(plan) if split is not None else plan,
        needed_bytes=fastest.memory.device_bytes,
        error=fastest.memory.error,
        spare_bytes=fastest.spare_bytes,
        doubts=doubts(fastest, planned.host_bytes),
        host_bytes=fastest.memory.machine_bytes,
        tokens_per_second=fastest.tokens_per_second,
        server=split,
        environment=environment(planned),
        settings=settings,
    )
    here = planned.gpu is None or planned.host_bytes is not None
    tokens, threads = longest_sequence(fastest.candidate, problem), planned.hardware.threads if here else None
    handover = handover_of(document, workload, planned.hardware, max_tokens=tokens, threads=threads)
    write_planned_bundle(document, handover, folder)
    return document


def _why_nothing(evaluator: Evaluator, best: Sequence[Estimate]) -> str:
    if any(each.memory is not None for each in best):
        return "nothing is predicted to fit"
    return f"nothing could be predicted: {evaluator.unknown_reason.rstrip('.')}"
