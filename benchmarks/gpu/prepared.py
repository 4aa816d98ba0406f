"""Converts a case to the requests for a probe and a trace: the same plan, on the same rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from autotune.app.arguments import SearchArguments
from autotune.app.options import checked_options
from autotune.app.problem import problem_of
from autotune.app.requests import probe_request
from autotune.app.workload import WorkloadReader
from autotune.core.candidate import Candidate
from autotune.core.events import ignore
from autotune.core.jobs.protocol import ProbeRequest
from autotune.core.jobs.traced import TraceRequest
from autotune.core.machine import Machine
from autotune.core.measurement import Schedule
from autotune.core.rows.heaviest import RowSummary, heaviest
from autotune.core.setting import GLOBAL_BATCH
from autotune.core.workload import Workload
from autotune.errors import AutotuneError
from autotune.inspection.dataset import dataset_source
from autotune.inspection.machine import machine as inspect_machine
from autotune.inspection.model import model_source
from autotune.probing import JobServer
from autotune.techniques.base import ON
from autotune.techniques.packing import NONE, SEPARATING
from autotune.trainers import find_trainer
from autotune.trainers.problem import TrainerProblem
from benchmarks.gpu.cases import Case, Scenario
from benchmarks.gpu.rows import write_rows_of
from benchmarks.pictured import write_pictured_rows, write_shape

_ATTENTIONS = ("sdpa", "eager")
_SEED = 42
# Threads that import one module of transformers at the same time can find it half initialised.
_WRITING = Lock()
_TRACED = find_trainer("sft").name
"""The trainer whose rows are sequences of so many tokens, so that the largest micro-batch follows from them alone."""


@dataclass(frozen=True)
class Prepared:
    """A scenario on a device: its model and its rows are read, and its cases can be asked for.

    Attributes:
        budget_bytes: what a case may use that has no limit of its own.
    """

    scenario: Scenario
    planned: Machine
    problem: TrainerProblem
    budget_bytes: int

    def candidate(self, case: Case) -> Candidate:
        """Return the choices of all techniques."""
        # The baseline does not pack, so that its normal form has no length beyond that of the rows.
        length = self.scenario.max_length
        changes = {**({} if length is None else {"max_length": length}), **case.choices}
        return self.problem.normal(self.problem.baseline.but(**changes))

    def limit_bytes(self, case: Case) -> int:
        """Return the memory that a case may use on the device, context included."""
        return min(case.limit_bytes or self.budget_bytes, self.budget_bytes)

    def flat(self, case: Case) -> bool:
        """Whether rows lie end to end in a micro-batch."""
        return _flat(self.candidate(case))

    def probe_request(self, case: Case, schedule: Schedule) -> ProbeRequest:
        """Return the request that measures a case."""
        return probe_request(self.problem, self.candidate(case), schedule, self.limit_bytes(case), _SEED)

    def trace_request(self, case: Case) -> TraceRequest | None:
        """Return the request that traces a case, with all layers, on the rows of the probe's largest micro-batch.

        None where a row is more than a number of tokens, as it is with an image: what is predicted of those comes from
        the planner alone.
        """
        if self.problem.trainer.name != _TRACED or self.scenario.pixels is not None:
            return None
        setting, gpu = self.problem.setting, self.planned.gpu
        return TraceRequest(
            plan=self.problem.trainer.plan(self.candidate(case), setting),
            model=setting.workload.model_source,
            target=setting.machine.hardware.kind,
            worst=tuple((tokens,) for tokens in self.worst(self.candidate(case))),
            gpu=gpu,
        )

    def worst(self, candidate: Candidate) -> Iterator[int]:
        """Yield the rows of the largest micro-batch: the longest, and where rows are packed, enough to fill it."""
        rows, lengths = int(candidate["per_device_train_batch_size"]), self.scenario.lengths
        longest_first = [tokens for tokens in sorted(lengths, reverse=True) for _ in range(lengths[tokens])]
        if candidate["packing"] == NONE:
            cut = np.array(longest_first).clip(max=int(candidate["max_length"]))
            yield from cut[
                heaviest(RowSummary(cut, cut, cut), rows, padded=not _flat(candidate), multiple=1)[0]
            ].tolist()
            return
        left = rows * int(candidate["max_length"])
        while left > 0:
            tokens = longest_first.pop(0)
            left -= tokens
            yield tokens


def on_host(machine: Machine, launch_seconds: float | None) -> Machine:
    """Return a machine whose host takes so long for an operator; None: as long as hosts usually do."""
    gpu = machine.gpu
    if gpu is None or gpu.speeds is None:
        return machine
    return replace(machine, gpu=replace(gpu, speeds=replace(gpu.speeds, launch_seconds=launch_seconds)))


def prepare(
    scenario: Scenario, shapes: Mapping[str, Mapping[str, Any]], planned: Machine, server: JobServer, folder: Path
) -> Prepared:
    """Write the models and the rows of a scenario, and read them.

    Args:
        shapes: configurations of the models that scenarios name.
        server: runs the jobs that read.
        folder: for files of this scenario alone.

    Raises:
        InputError: the software that is installed cannot do what the scenario fixes.
        AutotuneError: processes cannot be started, or a library that a model needs is not there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model, *teacher = (
        model_source(str(_written(folder / name, shapes[name])), "random")
        for name in (scenario.model, scenario.teacher)
        if name is not None
    )
    lengths = (tokens for tokens, count in scenario.lengths.items() for _ in range(count))
    if scenario.pixels is not None:
        rows = write_pictured_rows(folder / "rows.parquet", lengths, scenario.pixels, pairs=scenario.trainer == "dpo")
    else:
        rows = write_rows_of(scenario.trainer, folder / "rows.jsonl", lengths, shapes[scenario.model]["vocab_size"])
    reader = WorkloadReader(server, folder, ignore)
    workload = reader.read(scenario.trainer, model, dataset_source(str(rows)), teacher=next(iter(teacher), None))
    return prepared(scenario, reader.check_attention(workload, inspect_machine("cpu"), _ATTENTIONS), planned)


def _written(folder: Path, shape: Mapping[str, Any]) -> Path:
    try:
        with _WRITING:
            return write_shape(folder, shape)
    except ImportError as error:
        raise AutotuneError(str(error).strip().split("\n")[0]) from error


def prepared(scenario: Scenario, workload: Workload, planned: Machine) -> Prepared:
    """Return a scenario whose model and rows have been read.

    Raises:
        InputError: the software that is installed cannot do what the scenario fixes.
    """
    trainer = find_trainer(scenario.trainer)
    options = checked_options(
        SearchArguments(
            trainer=trainer.name,
            global_batch_size=scenario.rows,
            max_length=scenario.max_length,
            allow=[*(one.name for one in trainer.techniques), GLOBAL_BATCH],
            fix=scenario.fix,
            teacher=workload.teacher_source.name if workload.teacher_source is not None else None,
        )
    )
    problem = problem_of(options, workload, planned, scenario.rows)
    return Prepared(scenario, planned, problem, planned.hardware.available_bytes)


def _flat(candidate: Candidate) -> bool:
    return candidate.get("packing") in SEPARATING or candidate.get("padding_free") == ON
