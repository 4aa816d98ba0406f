"""The jobs of a server as functions, from a request to a reply or a measurement."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from autotune.confidential import hidden
from autotune.core.configuration import Built, ReadCommand
from autotune.core.exchange import ExchangeError
from autotune.core.gpu import GpuSpeeds
from autotune.core.measurement import Measurement, of_ranks
from autotune.core.protocol import (
    LOG_FILE,
    RANK_FOLDER,
    BuildRequest,
    CheckPackingReply,
    CheckPackingRequest,
    Failure,
    InputProblem,
    Job,
    OperatorsReply,
    OperatorsRequest,
    PrepareReply,
    PrepareRequest,
    ProbeReply,
    ProbeRequest,
    RanksReply,
    ReadCommandRequest,
    SpeedsRequest,
)
from autotune.core.status import OUT_OF_MEMORY, ProbeStatus
from autotune.core.traced import TraceReplies, TraceReply, TraceRequest, TraceRequests
from autotune.errors import AutotuneError, InputError, JobLostError, UnreadError
from autotune.probing.classify import classify, out_of_memory_kills
from autotune.probing.server import JobExit, JobServer, received_reply
from autotune.probing.worker import Worker
from autotune.units import format_duration

R = TypeVar("R")
_SHOWN_LINES = 5


def prepare(
    server: JobServer, request: PrepareRequest, folder: Path, timeout_seconds: float | None = None
) -> PrepareReply:
    """Read the model, tokenise the dataset, and return the profiles of both.

    Raises:
        InputError: the model or the dataset cannot be used.
        JobLostError: it took longer than it may.
        AutotuneError: the job failed in another way; the message names its log.
    """
    ending = server.run(Job.PREPARE, request, folder, timeout_seconds)
    if ending.timed_out:
        raise JobLostError(
            f"Reading {request.model.name} and tokenising {request.dataset.name} was ended after "
            f"{format_duration(ending.wall_seconds)}.",
            hint="Give fewer rows with --dataset, or check that the chat template terminates.",
        )
    return _expect(PrepareReply, ending, folder)


def check_packing(server: JobServer, request: CheckPackingRequest, folder: Path) -> CheckPackingReply:
    """Compare packed with separate logits for each attention implementation, on a shrunken copy of the model.

    Raises:
        InputError: the model cannot be used.
        AutotuneError: the job failed in another way; the message names its log.
    """
    return _expect(CheckPackingReply, server.run(Job.CHECK_PACKING, request, folder), folder)


def trace(server: JobServer, request: TraceRequest, folder: Path, timeout_seconds: float | None = None) -> TraceReply:
    """Run training steps of a plan on the virtual accelerator, with no GPU.

    Raises:
        InputError: the model cannot be used.
        AutotuneError: the step cannot be traced; the message names the operator or the combination.
    """
    replies, failure = trace_all(server, (request,), folder, timeout_seconds)
    if failure is not None:
        raise failure
    return replies[0]


def trace_all(
    server: JobServer | Worker, requests: Sequence[TraceRequest], folder: Path, timeout_seconds: float | None = None
) -> tuple[tuple[TraceReply, ...], AutotuneError | None]:
    """Trace plans one after another in one process, which is faster than one process each, until one fails.

    Returns:
        The replies before the failure, and the failure if there is one: its message names the operator or the
        combination.

    Raises:
        InputError: the model cannot be used.
        AutotuneError: the process ended without a reply.
    """
    asked = TraceRequests(tuple(requests))
    found = _expect(TraceReplies, server.run(Job.TRACE, asked, folder, timeout_seconds), folder)
    return found.replies, _failed_with(found.failure, folder) if found.failure is not None else None


def read_command(server: JobServer, request: ReadCommandRequest, folder: Path) -> ReadCommand:
    """Read a user's command with TRL's own parser and classes.

    Raises:
        AutotuneError: the job failed; the message names its log.
    """
    return _expect(ReadCommand, server.run(Job.READ_COMMAND, request, folder), folder)


def build(server: JobServer, request: BuildRequest, folder: Path) -> Built:
    """Build the trainer of a plan on the virtual device, and return what TRL refuses, changes, or warns of.

    Raises:
        InputError: the model cannot be used.
        AutotuneError: the job failed; the message names its log.
    """
    return _expect(Built, server.run(Job.BUILD, request, folder), folder)


def measure_speeds(server: JobServer, request: SpeedsRequest, folder: Path) -> GpuSpeeds:
    """Measure the CPU that the server's jobs run on.

    Raises:
        AutotuneError: the job failed; the message names its log.
    """
    return _expect(GpuSpeeds, server.run(Job.MEASURE_SPEEDS, request, folder), folder)


def measure_operators(
    server: JobServer, request: OperatorsRequest, folder: Path, timeout_seconds: float | None = None
) -> OperatorsReply:
    """Measure operators on the device of the server's jobs.

    Raises:
        AutotuneError: the job failed; the message names its log.
    """
    return _expect(OperatorsReply, server.run(Job.MEASURE_OPERATORS, request, folder, timeout_seconds), folder)


def probe(server: JobServer, request: ProbeRequest, folder: Path, timeout_seconds: float | None = None) -> Measurement:
    """Run training steps and return the measurement. A probe that fails is a measurement as well, not an exception.

    Args:
        timeout_seconds: time after which the probe is killed, with every process that it started; None: never.

    Raises:
        InputError: the folder was removed or cannot be written, or the disk is full.
        ProbeServerError: probes cannot be started at all.
    """
    kills_before = out_of_memory_kills()
    ending = server.run(Job.PROBE, request, folder, timeout_seconds)
    measurement = _measurement(ending, request, folder, out_of_memory_kills() - kills_before)
    return replace(measurement, wall_seconds=ending.wall_seconds)


def _measurement(ending: JobExit, request: ProbeRequest, folder: Path, kills: int) -> Measurement:
    try:
        if request.plan.launch.processes == 1:
            return _replied(received_reply(folder, ProbeReply))
        group = received_reply(folder, RanksReply)
    except ExchangeError as error:
        return _classified(ending, error, folder, request, kills)
    return _of_group(group, request, folder, kills) if isinstance(group, RanksReply) else _replied(group)


def _of_group(group: RanksReply, request: ProbeRequest, folder: Path, kills: int) -> Measurement:
    """Return the measurement of all ranks: of a rank that failed, with its number, or what all of them need."""
    found: dict[int, Measurement] = {}
    for rank, ended in enumerate(group.endings):
        own = folder / RANK_FOLDER.format(rank=rank)
        try:
            found[rank] = _replied(received_reply(own, ProbeReply))
        except ExchangeError as error:
            if not ended.ended_with_group:
                ending = JobExit(0.0, ended.code, ended.signal)
                found[rank] = _classified(ending, error, own, request, kills)
    failed = {rank: shown for rank, shown in found.items() if not shown.ok}
    if not failed:
        return of_ranks([found[rank] for rank in range(len(group.endings))])
    # A rank that runs out of memory makes the others fail in the operation in which they wait for it.
    rank = min(failed, key=lambda rank: (failed[rank].status not in OUT_OF_MEMORY, rank != group.first_failed, rank))
    return replace(failed[rank], reason=f"rank {rank}: {failed[rank].reason}")


def _classified(ending: JobExit, error: ExchangeError, folder: Path, request: ProbeRequest, kills: int) -> Measurement:
    lines = last_lines(folder, 50)
    return classify(ending, str(error), lines, device=request.device, limit_bytes=request.limit_bytes, kills=kills)


def _replied(reply: ProbeReply | InputProblem | Failure) -> Measurement:
    if isinstance(reply, ProbeReply):
        return of_ranks(reply.ranks)
    kind = reply.kind if isinstance(reply, Failure) else "InputError"
    return Measurement(ProbeStatus.CRASHED, f"{kind}: {reply.message}")


def _expect(expected: type[R], ending: JobExit, folder: Path) -> R:
    try:
        reply = received_reply(folder, expected)
    except ExchangeError as error:
        if ending.timed_out:
            message = f"A job was ended after {format_duration(ending.wall_seconds)}, which is longer than it may take."
            raise _failed(JobLostError, message, folder) from error
        ended = f"signal {ending.signal}" if ending.signal is not None else f"exit status {ending.code}"
        raise _failed(JobLostError, f"A job ended with {ended}, and its {error}.", folder) from error
    if isinstance(reply, InputProblem):
        raise (UnreadError if reply.unread else InputError)(reply.message, hint=reply.hint)
    if isinstance(reply, Failure):
        raise _failed_with(reply, folder)
    return reply


def _failed_with(failure: Failure, folder: Path) -> AutotuneError:
    return _failed(AutotuneError, f"A job failed with {failure.kind}: {failure.message}", folder)


def _failed(kind: type[AutotuneError], message: str, folder: Path) -> AutotuneError:
    log_lines = "\n".join(f"  {line}" for line in last_lines(folder, _SHOWN_LINES))
    return kind(message, hint=f"Its log, {folder / LOG_FILE}, ends with:\n{log_lines}")


_READ_BYTES = 16_384
_LINE_CHARACTERS = 300


def last_lines(folder: Path, count: int) -> list[str]:
    """Return up to ``count`` of the last lines of a job's log that are not blank; none when there is no log."""
    try:
        with (folder / LOG_FILE).open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _READ_BYTES))
            text = log.read().decode(errors="replace")
    except OSError:
        return []
    lines = [hidden(line.strip()) for line in text.splitlines()]
    return [line[:_LINE_CHARACTERS] for line in lines if line][-count:]
