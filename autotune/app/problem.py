"""Builds the search problem of a run from its options, workload and machine."""

from __future__ import annotations

from dataclasses import replace

from autotune.app.base import Start
from autotune.app.options import Options
from autotune.core.machine import Machine
from autotune.core.setting import Setting
from autotune.core.workload import Workload
from autotune.errors import InputError
from autotune.space import resolve
from autotune.techniques import find
from autotune.techniques.context_parallel import NAME as CONTEXT_PARALLEL
from autotune.techniques.packing import NAME as PACKING
from autotune.techniques.packing import NONE
from autotune.trainers.problem import TrainerProblem, require_legal


def global_batch_of(options: Options, machine: Machine) -> int:
    """Return the documents of an optimizer step: the user's number, or TRL's default.

    Raises:
        InputError: the processes do not divide the number.
    """
    processes, shared = machine.hardware.processes, options.ranks_per_row
    ranks = max(1, processes // shared)
    batch = options.global_batch_size
    if batch is None:
        # TRL accumulates over one micro-batch by default.
        return int(find("per_device_train_batch_size", options.trainer.techniques).trl_default) * ranks
    if batch % ranks:
        together = f"{processes} processes" if shared == 1 else f"{processes} processes, {shared} to a row"
        raise InputError(
            f"A global batch of {batch} {options.trainer.document_noun} cannot be reached with {together}.",
            hint=f"Take a multiple of {ranks}.",
        )
    return batch


def attentions(options: Options, machine: Machine, users: str | None = None) -> tuple[str, ...]:
    """Return the attention implementations that this machine supports and the search may use.

    Args:
        users: the user's own implementation; None: TRL's default.
    """
    technique = find("attention", options.trainer.techniques)
    fixed = options.fixed.get(technique.name)
    listed = options.file.choices.get(technique.name, ()) if technique.name not in options.excluded else ()
    wanted = (fixed,) if fixed is not None else (users or technique.trl_default, *listed)
    return tuple(dict.fromkeys(str(item) for item in wanted if technique.unavailable(item, machine) is None))


def problem_of(
    options: Options, workload: Workload, machine: Machine, batch: int, start: Start | None = None
) -> TrainerProblem:
    """Return the problem of a run.

    Args:
        batch: documents of an optimizer step.
        start: the start of a search with a base; its token coverage overrides the options'.

    Raises:
        InputError: a fixed choice is not possible here.
    """
    base, coverage = (start.base, start.token_coverage) if start is not None else (None, options.token_coverage)
    shared = options.ranks_per_row
    if base is not None and CONTEXT_PARALLEL not in options.fixed:
        shared = int(base.choices.get(CONTEXT_PARALLEL, 1))
    # A single process may keep DeepSpeed if the user's configuration has it.
    offloads = base is not None and "args.deepspeed" in base.documents
    entries = base.entries if base is not None else {}
    args = {path.removeprefix("args."): value for path, value in entries.items() if path.startswith("args.")}
    args[PACKING] = base is not None and base.choices.get(PACKING, NONE) != NONE
    columns = workload.dataset.columns
    depends = options.trainer.loss_depends_on(args, workload.model, machine.hardware.processes, columns)
    allowed, fixed, excluded = options.allowed, options.fixed, options.excluded
    setting = Setting(workload, machine, batch, coverage, allowed, base, shared, offloads, fixed, excluded, depends)
    fixed_length = fixed.get("max_length")
    if fixed_length is not None:
        # A fixed maximum length determines the token coverage.
        tokens = find("max_length", options.trainer.techniques).parse(fixed_length, setting)
        kept = min(documents.least_coverage(int(tokens)) for documents in workload.cut_by_length.values())
        setting = replace(setting, token_coverage=kept)
    space = resolve(options.file, options.trainer.techniques, setting)
    problem = TrainerProblem(options.trainer, space, setting)
    require_legal(problem)
    return problem


def with_last_resorts(problem: TrainerProblem) -> TrainerProblem:
    """Return a problem with the choices of last resort added; the problem itself if there are none."""
    setting = replace(problem.setting, last_resorts=True)
    space = resolve(problem.space.file, problem.trainer.techniques, setting)
    if space.choices == problem.choices and space.left_out == problem.space.left_out:
        return problem
    return TrainerProblem(problem.trainer, space, setting)
