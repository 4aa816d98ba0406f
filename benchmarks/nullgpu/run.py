"""Traces cases, runs them on null GPUs, and records the results."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

from autotune.app.planned import planned_machine
from autotune.app.requests import probe_request
from autotune.app.workload import WorkloadReader
from autotune.core.events import ignore
from autotune.core.jobs.protocol import ProbeRequest
from autotune.core.jobs.traced import TraceReply, TraceRequest
from autotune.core.measurement import Measurement, Schedule
from autotune.core.workload import Workload
from autotune.errors import InputError
from autotune.inspection.dataset import dataset_source
from autotune.inspection.machine import machine as inspect_machine
from autotune.inspection.model import model_source
from autotune.nullgpu.devices import null_device
from autotune.nullgpu.environment import environment
from autotune.planning.single import trace_request
from autotune.probing import JobServer, probe
from autotune.probing.tracing import ServerTracer, Traced, Untraceable
from autotune.trainers.evaluation import whole_geometry
from benchmarks.gpu.prepared import Prepared, prepared
from benchmarks.gpu.rows import write_rows_of
from benchmarks.nullgpu.cases import Case
from benchmarks.nullgpu.models import MODELS, PICTURED
from benchmarks.nullgpu.pictured import write_pictured
from benchmarks.nullgpu.record import Record
from benchmarks.shapes import write_model

_SCHEDULE = Schedule(
    warmup_micro_batches=1, min_micro_batches=2, max_micro_batches=2, max_seconds=1.0, target_error=0.05
)
_LONGEST_SECONDS = 400.0
_SEED = 42
_CHECKED = ("packing", "padding_free")
_TRACED_TOGETHER = 16
_PRELOADED = "benchmarks.nullgpu.preloaded"


def run(cases: Sequence[Case], record: Record, sources: Mapping[str, str]) -> None:
    """Trace and run the cases that the record does not have from the same sources.

    Args:
        sources: hashes of what a trace and of what a run depends on, by ``traced`` and ``measured``; or of one of them.
    """
    with tempfile.TemporaryDirectory() as directory, ServerTracer(1, ignore) as tracer:
        bench = _Bench(Path(directory), Workloads(tracer.server, Path(directory)), record, sources)
        for gpu, processes in dict.fromkeys((case.gpu, case.processes) for case in cases):
            group = [case for case in cases if (case.gpu, case.processes) == (gpu, processes)]
            if "measured" in sources:
                bench.measure(group, gpu, processes)
            if "traced" in sources:
                bench.trace(group, tracer)


@dataclass(frozen=True)
class _Bench:
    folder: Path
    workloads: Workloads
    record: Record
    sources: Mapping[str, str]

    def _asked(self, cases: Sequence[Case], what: str) -> Iterator[tuple[Case, Asked]]:
        """Yield the cases with missing results, with their requests."""
        for case in cases:
            if self.record.rows.get(case.name, {}).get(what, {}).get("sources") == self.sources[what]:
                continue
            planned = planned_machine(case.gpu, case.processes)
            try:
                yield case, asked_of(case, prepared(case.scenario, self.workloads.of(case), planned))
            except InputError as error:
                print(f"{case.name}: {error}", flush=True)

    def _put(self, case: Case, what: str, found: Mapping[str, Any]) -> None:
        self.record.put(case, **{what: {"sources": self.sources[what], **found}})
        print(line(self.record.rows[case.name]), flush=True)

    def measure(self, cases: Sequence[Case], gpu: str, processes: int) -> None:
        """Run cases on null GPUs of one kind."""
        table = self.folder / f"{gpu}-{processes}"
        server: JobServer | None = None
        for case, asked in self._asked(cases, "measured"):
            if server is None:
                variables = environment(null_device(gpu), count=processes, table=table)
                with mock.patch.dict(os.environ, variables):
                    server = JobServer("cuda", threads=1, processes=processes, jobs_module=_PRELOADED)
            own = self.folder / "probe"
            self._put(case, "measured", _measured(probe(server, asked.probe, own, _LONGEST_SECONDS)))
            shutil.rmtree(own)
        if server is not None:
            server.close()

    def trace(self, cases: Sequence[Case], tracer: ServerTracer) -> None:
        """Trace cases, several in a process, where some of the work is remembered."""
        waiting = self._asked(cases, "traced")
        while some := list(islice(waiting, _TRACED_TOGETHER)):
            replies = iter(tracer([request for _, asked in some for request in asked.traces]))
            for case, asked in some:
                self._put(case, "traced", _most([next(replies) for _ in asked.traces]))


@dataclass(frozen=True)
class Asked:
    """The requests for a null GPU and for traces of a case: the same plan, on the same rows."""

    probe: ProbeRequest
    traces: tuple[TraceRequest, ...]


def asked_of(case: Case, where: Prepared) -> Asked:
    """Return the requests of a case.

    Raises:
        InputError: the candidate is not possible.
    """
    problem, length = where.problem, where.scenario.max_length
    setting, trainer = problem.setting, problem.trainer
    known = {item.name: item for item in trainer.techniques}
    choices = {knob: known[knob].parse(choice, setting) for knob, choice in case.candidate.items()}
    changes = {**({} if length is None else {"max_length": length}), **choices}
    candidate = problem.normal(problem.baseline.but(**changes))
    illegal = problem.illegal(candidate)
    if illegal is not None:
        raise InputError(illegal)
    plan = trainer.plan(candidate, setting)
    geometry = whole_geometry(trainer, plan, setting.workload)
    layers = len(setting.workload.model.layer_kinds)
    asked = probe_request(problem, candidate, replace(_SCHEDULE, saves=plan.in_group), None, _SEED)
    traces = [
        trace_request(plan, geometry.layout, shape, layers, setting, where.planned.gpu) for shape in geometry.shapes
    ]
    if not trainer.generates:
        # A search's traces have two micro-batches in a step, of which figures for any number follow.
        steps = {"gradient_accumulation_steps": case.micro_batches}
        traces = [replace(each, plan=replace(each.plan, args={**each.plan.args, **steps})) for each in traces]
    return Asked(asked, tuple(traces))


class Workloads:
    """Reads models and rows, each once.

    Args:
        server: runs the jobs that read.
        folder: for models, rows, and the files of jobs.
    """

    def __init__(self, server: JobServer, folder: Path) -> None:
        self._server = server
        self._folder = folder
        self._read: dict[tuple[str, bool], Workload] = {}

    def of(self, case: Case) -> Workload:
        """Return the workload of a case; whether packed rows stay apart is checked where the case asks for it."""
        checked = any(knob in case.choices for knob in _CHECKED)
        key = case.workload, checked
        if key not in self._read:
            folder = self._folder / f"workload-{len(self._read)}"
            folder.mkdir()
            model, rows = self._written(case, folder)
            reader = WorkloadReader(self._server, folder, ignore)
            found = reader.read(case.trainer, model_source(str(model), "random"), dataset_source(str(rows)))
            if checked:
                found = reader.check_attention(found, inspect_machine("cpu"), ("sdpa", "eager"))
            if case.model in PICTURED and found.longest != max(case.lengths):
                raise InputError(f"Its longest row has {found.longest} tokens.")
            self._read[key] = found
        return self._read[key]

    def _written(self, case: Case, folder: Path) -> tuple[Path, Path]:
        """Write a case's model and rows, and return their places."""
        if case.model in PICTURED:
            return write_pictured(case.model, case.trainer, folder)
        lengths = [tokens for tokens, count in case.lengths.items() for _ in range(count)]
        vocabulary = int(MODELS[case.model]["vocab_size"])
        rows = write_rows_of(case.trainer, folder / "rows.jsonl", lengths, vocabulary, case.prompts)
        return write_model(self._folder / case.model, MODELS[case.model]), rows


def _most(replies: Sequence[Traced]) -> dict[str, Any]:
    """Return the largest figures of traces of micro-batches of which each may need the most."""
    failed = [reply.reason for reply in replies if isinstance(reply, Untraceable)]
    if failed:
        return {"reason": failed[0]}
    good = [reply for reply in replies if isinstance(reply, TraceReply)]
    replays = [reply.own.replays[0] for reply in good]
    peaks: dict[str, int] = {}
    for reply, replayed in zip(good, replays, strict=True):
        beside = replayed.allocated_bytes - reply.device.bytes
        for section in reply.sections:
            name = section.part.phase
            peaks[name] = max(peaks.get(name, 0), max(section.totals, default=0) + beside)
    return {
        "allocated": max(replayed.allocated_bytes for replayed in replays),
        "reserved": max(replayed.reserved_bytes or 0 for replayed in replays),
        "worst": [max(reply.worst_rows for reply in good), max(reply.worst_tokens for reply in good)],
        "peaks": peaks,
        "seconds": round(sum(reply.seconds for reply in good), 1),
    }


def _measured(found: Measurement) -> dict[str, Any]:
    if not found.ok:
        return {"status": found.status.value, "reason": found.reason}
    return {
        "status": found.status.value,
        "allocated": found.peak_bytes,
        "reserved": found.reserved_bytes,
        "worst": [found.worst_rows, found.worst_tokens],
        "peaks": dict(found.peaks),
        "seconds": round(found.wall_seconds, 1),
    }


def line(row: Mapping[str, Any]) -> str:
    """Return the results of a case in one line."""
    traced, measured = row.get("traced", {}), row.get("measured", {})

    def both(name: str) -> str:
        told, real = traced.get(name), measured.get(name)
        if told is None or real is None:
            return f"{name} -"
        return f"{name} {told / 2**20:,.1f} {real / 2**20:,.1f} MiB {(told / real - 1):+.2%}"

    why = " ".join(each["reason"] for each in (traced, measured) if "reason" in each)
    seconds = f"{traced.get('seconds')} s, {measured.get('seconds')} s"
    return f"{row['case']}: {both('allocated')}; {both('reserved')}; {seconds} {why[:600]}"
