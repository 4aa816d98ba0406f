"""The use case behind ``autotune probe``: search, confirm, and hand over the fastest configuration that fits."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Literal

from autotune.api.result import ProbeResult
from autotune.app.ahead import Ahead, predicting
from autotune.app.notes import notes_on
from autotune.app.options import checked_options
from autotune.app.outcome import RunFacts, result_of
from autotune.app.output import Output, default_output, open_output
from autotune.app.problem import attentions, global_batch_of, problem_of
from autotune.app.search import Run, run_search
from autotune.app.workload import WorkloadReader
from autotune.core.candidate import Choice
from autotune.core.events import Listener, WorkloadReady, ignore
from autotune.core.machine import Machine
from autotune.core.workload import Init
from autotune.emit.bundle import write_bundle
from autotune.inspection.budget import memory_budget as checked_budget
from autotune.inspection.dataset import dataset_source
from autotune.inspection.machine import machine as inspect_machine
from autotune.inspection.model import model_source
from autotune.probing import JobServer


def probe(
    model: str,
    dataset: str,
    *,
    trainer: str = "sft",
    device: Literal["auto", "cuda", "cpu"] = "auto",
    memory_budget: str | int | None = None,
    margin: float = 0.05,
    global_batch_size: int | None = None,
    max_length: int | None = None,
    token_coverage: float | None = None,
    allow: Iterable[str] = (),
    fix: Mapping[str, Choice] | None = None,
    exclude: Iterable[str] = (),
    space: str | Path | None = None,
    effort: str = "normal",
    trials: int | None = None,
    timeout: str | float | None = None,
    init: Init = "random",
    seed: int = 42,
    storage: str | None = None,
    study: str | None = None,
    resume: bool = False,
    output: str | Path | None = None,
    plan: bool = True,
    listener: Listener = ignore,
) -> ProbeResult:
    """Search for the fastest configuration that fits, by training steps in processes of their own on this machine.

    Args:
        model: hub id, local directory, or ``config.json``.
        dataset: hub id, or a local file or directory, in any format that the trainer takes.
        trainer: which of TRL's trainers.
        device: ``auto`` takes a GPU where there is one.
        memory_budget: memory that training may need, such as ``24GiB`` or in bytes; None: what others leave free.
        margin: share of the budget that is kept free while probing, so that the promise has room.
        global_batch_size: rows per optimizer step; None: 8 per process, as TRL's defaults give.
        max_length: tokens to which rows are cut; None: searched, within the token coverage.
        token_coverage: share of the dataset's tokens that must be trained on; None: 0.99.
        allow: knobs whose training-changing choices may be searched, such as ``lora``.
        fix: by knob, the only choice to consider.
        exclude: knobs that stay at TRL's default.
        space: a space file instead of the one that ships with autotune.
        effort: ``quick``, ``normal`` or ``thorough``.
        trials: probes at the most; None: as the effort says.
        timeout: for the whole search, such as ``10m`` or in seconds.
        init: ``random`` needs no weights; ``pretrained`` loads them.
        seed: of the search and of the order of batches.
        storage: URL of an Optuna storage; None: ``study.db`` in the output directory.
        study: name of the study in it; None: the output directory's name.
        resume: whether to continue the study that is there.
        output: directory of the bundle; None: ``autotune-<model>-<dataset>``.
        plan: whether steps are traced before the first probe, so that what cannot fit is not probed.
        listener: is told what happens, as it happens.

    Raises:
        InputError: something that was given cannot be used.
        AutotuneError: probes cannot be started, or the study or bundle cannot be written.
    """
    started = time.monotonic()
    options = checked_options(
        trainer=trainer,
        device=device,
        margin=margin,
        global_batch_size=global_batch_size,
        max_length=max_length,
        token_coverage=token_coverage,
        allow=allow,
        fix=fix or {},
        exclude=exclude,
        space=space,
        effort=effort,
        trials=trials,
        timeout=timeout,
        seed=seed,
    )
    source, rows = model_source(model, init), dataset_source(dataset)
    machine = inspect_machine(device)
    batch = global_batch_of(options, machine)
    out = open_output(output if output is not None else default_output(model, dataset))
    budget_bytes = _budget(memory_budget, machine, out, resume=resume)
    with JobServer(machine.hardware.kind, threads=machine.hardware.threads) as server:
        reader = WorkloadReader(server, out.workload, listener)
        workload = reader.read(options.trainer.name, source, rows)
        workload = reader.check_attention(workload, machine, attentions(options, machine))
        problem = problem_of(options, workload, machine, batch)
        listener(WorkloadReady(workload, budget_bytes, problem.size, problem.baseline))
        out.remember_budget(budget_bytes)
        limit_bytes = int(budget_bytes * (1 - margin))
        with predicting(problem, limit_bytes, options, server, listener) if plan else nullcontext(Ahead()) as ahead:
            run = Run(
                ahead.left_of(options), problem, server, out, limit_bytes, storage, study, resume, ahead.predictor
            )
            outcome = run_search(run, listener)
    facts = RunFacts(
        budget_bytes=budget_bytes,
        margin=margin,
        notes=(*notes_on(problem, options), *ahead.notes()),
        wall_seconds=time.monotonic() - started,
        settings={"model": model, "dataset": dataset, "effort": effort, "init": init, "seed": seed, "plan": plan},
        output_directory=str(out.directory),
        comparisons=options.effort.comparisons,
    )
    result = result_of(outcome, problem, facts)
    write_bundle(result, out.directory)
    return ProbeResult(result)


def _budget(asked: str | int | None, machine: Machine, out: Output, *, resume: bool) -> int:
    remembered = out.remembered_budget() if resume and asked is None else None
    return checked_budget(asked if remembered is None else remembered, machine.hardware)
