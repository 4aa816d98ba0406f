"""Runs jobs on a job server: one function per job, from a request to its reply or, of a probe, to how it failed."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

from autotune.confidential import hidden
from autotune.core.configuration import Built, ReadCommand
from autotune.core.files.scratch import is_temporary
from autotune.core.gpu import GpuSpeeds
from autotune.core.jobs.exchange import ExchangeError
from autotune.core.jobs.protocol import (
    LOG_FILE,
    RANK_FOLDER,
    CheckPackingRequest,
    Failure,
    Job,
    OperatorsRequest,
    PrepareRequest,
    ProbeRequest,
    ReadCommandRequest,
    SmokeTestRequest,
    SpeedsRequest,
)
from autotune.core.jobs.ranks import rank_variables, reserved_port
from autotune.core.jobs.traced import TraceReply, TraceRequest
from autotune.core.machine import DeviceKind
from autotune.core.measurement import Measurement, combine_ranks
from autotune.core.status import OUT_OF_MEMORY, ProbeStatus
from autotune.core.workload import PackingCheck, Workload
from autotune.errors import AutotuneError, JobLostError
from autotune.probing.channel import read_tail, signal_name
from autotune.probing.server import JobExit, JobServer, Worker, load_reply
from autotune.units import format_bytes, format_duration

RequestT = TypeVar("RequestT")
ReplyT = TypeVar("ReplyT")
_SHOWN_LINES = 5
# Message of libstdc++ for an uncaught allocation failure.
_BAD_ALLOC = "std::bad_alloc"
# Message of libraries, such as bitsandbytes, that end the process when CUDA is out of memory.
_DEVICE_OUT_OF_MEMORY = "out of memory"


def prepare(server: JobServer, request: PrepareRequest, folder: Path, timeout_seconds: float | None = None) -> Workload:
    """Read the model, tokenise the dataset, and return the profiles of both.

    Raises:
        InputError: the model or the dataset cannot be used.
        JobLostError: the time limit was exceeded.
        AutotuneError: the job failed in another way; the message names its log.
    """
    ending = server.run(Job.PREPARE, request, folder, timeout_seconds)
    if ending.timed_out:
        raise JobLostError(
            f"Reading {request.model.name} and tokenising {request.dataset.name} was ended after "
            f"{format_duration(ending.wall_seconds)}.",
            hint="Give fewer rows with --dataset, or check that the chat template terminates.",
        )
    return _load_expected(Workload, Job.PREPARE, ending, folder)


@dataclass(frozen=True)
class _JobFunction(Generic[RequestT, ReplyT]):
    """Function that runs one job, from its request to its reply.

    Raises:
        InputError: the model cannot be used, or the disk is full.
        JobLostError: another try may succeed.
        AutotuneError: the job failed; the message names its log, or the operator that cannot be traced.
    """

    job: Job
    request: type[RequestT]
    reply: type[ReplyT]

    def __call__(
        self, server: JobServer | Worker, request: RequestT, folder: Path, timeout_seconds: float | None = None
    ) -> ReplyT:
        return _load_expected(self.reply, self.job, server.run(self.job, request, folder, timeout_seconds), folder)


check_packing = _JobFunction(Job.CHECK_PACKING, CheckPackingRequest, tuple[PackingCheck, ...])
"""Compares packed with separate logits for each attention implementation, on a shrunken copy of the model."""
trace = _JobFunction(Job.TRACE, TraceRequest, TraceReply)
"""Runs training steps of a plan on the virtual accelerator, with no GPU."""
read_command = _JobFunction(Job.READ_COMMAND, ReadCommandRequest, ReadCommand)
"""Reads a user's command with TRL's own parser and classes."""
smoke_test = _JobFunction(Job.SMOKE_TEST, SmokeTestRequest, dict[str, str])
"""Trains a tiny model with a user's arguments on the CPU, and returns those that end the training."""
build = _JobFunction(Job.BUILD, TraceRequest, Built)
"""Builds the trainer of a plan on the virtual device, and returns what TRL refuses or warns of."""
measure_speeds = _JobFunction(Job.MEASURE_SPEEDS, SpeedsRequest, GpuSpeeds)
"""Measures the CPU that the server's jobs run on."""
measure_operators = _JobFunction(Job.MEASURE_OPERATORS, OperatorsRequest, dict[str, float | None])
"""Measures operators on the device of the server's jobs."""


def probe(server: JobServer, request: ProbeRequest, folder: Path, timeout_seconds: float | None = None) -> Measurement:
    """Run training steps and return the measurement. A failed probe is a measurement as well, not an exception.

    A probe that is killed, or of which a rank is, without evidence of memory exhaustion is repeated once, if as much
    time is left: the cause may be unrelated to its candidate.

    Args:
        timeout_seconds: time after which the probe is killed, with every process that it started; None: never.

    Raises:
        InputError: the folder was removed or cannot be written, the disk is full, or the model can no longer be read.
        ProbeServerError: probes cannot be started.
    """
    ending, measurement = _probe_once(server, request, folder, timeout_seconds)
    remaining_seconds = None if timeout_seconds is None else timeout_seconds - ending.wall_seconds
    can_repeat = remaining_seconds is None or remaining_seconds >= ending.wall_seconds
    if ending.signal == signal.SIGKILL and measurement.unexplained and can_repeat:
        second_exit, measurement = _probe_once(server, request, folder, remaining_seconds)
        if second_exit.signal == signal.SIGKILL and measurement.unexplained:
            measurement = replace(measurement, reason=f"twice {measurement.reason}")
    return measurement


def _probe_once(
    server: JobServer, request: ProbeRequest, folder: Path, timeout_seconds: float | None
) -> tuple[JobExit, Measurement]:
    if request.plan.launch.processes > 1:
        began = time.monotonic()
        ending, measurement = _probe_ranks(server, request, folder, timeout_seconds)
        ending = replace(ending, wall_seconds=time.monotonic() - began)
    else:
        ending = server.run(Job.PROBE, request, folder, timeout_seconds)
        measurement = _load_measurement(ending, request, folder)
    return ending, replace(measurement, wall_seconds=ending.wall_seconds)


def _probe_ranks(
    server: JobServer, request: ProbeRequest, folder: Path, timeout_seconds: float | None
) -> tuple[JobExit, Measurement]:
    """Run a probe in one process per rank; return the exit and measurement of a failed rank, or of all combined.

    When a rank fails, the others are killed: they would wait for it in a collective operation forever.
    """
    count = request.plan.launch.processes
    folders = [folder / RANK_FOLDER.format(rank=rank) for rank in range(count)]
    by_rank: dict[int, tuple[JobExit, Measurement]] = {}
    failed_ranks: list[int] = []
    with ExitStack() as stack:
        port = stack.enter_context(reserved_port())
        workers = [stack.enter_context(closing(Worker(server))) for _ in folders]
        pool = stack.enter_context(ThreadPoolExecutor(count))
        # After an error or an interrupt, threads still wait for their ranks.
        stack.callback(_interrupt, workers)
        running = {
            pool.submit(
                workers[rank].run, Job.PROBE, request, folders[rank], timeout_seconds, rank_variables(rank, count, port)
            ): rank
            for rank in range(count)
        }
        for future in as_completed(running):
            rank, ending = running[future], future.result()
            if failed_ranks and ending.signal == signal.SIGKILL and not ending.oom_kills:
                continue
            by_rank[rank] = ending, _load_measurement(ending, request, folders[rank])
            if not by_rank[rank][1].ok:
                failed_ranks.append(rank)
                _interrupt(workers)
    if not failed_ranks:
        return by_rank[0][0], combine_ranks([by_rank[rank][1] for rank in range(count)])
    # A rank that runs out of memory makes the others fail in a collective operation, so it takes precedence.
    rank = min(failed_ranks, key=lambda rank: by_rank[rank][1].status not in OUT_OF_MEMORY)
    ending, measurement = by_rank[rank]
    timed_out = measurement.status is ProbeStatus.TIMEOUT
    return ending, measurement if timed_out else replace(measurement, reason=f"rank {rank}: {measurement.reason}")


def _interrupt(workers: Iterable[Worker]) -> None:
    for worker in workers:
        worker.interrupt()


def _load_measurement(ending: JobExit, request: ProbeRequest, folder: Path) -> Measurement:
    try:
        reply = load_reply(folder, Measurement)
    except ExchangeError as error:
        lines = last_lines(folder, 50)
        return classify(ending, str(error), lines, device=request.device, limit_bytes=request.limit_bytes)
    if isinstance(reply, Failure):
        return Measurement(ProbeStatus.CRASHED, f"{reply.kind}: {reply.message}")
    return reply


def classify(
    ending: JobExit, unreadable: str, log: Sequence[str], *, device: DeviceKind, limit_bytes: int | None
) -> Measurement:
    """Return the measurement of a probe without a readable reply.

    Args:
        unreadable: problem of the reply, such as "reply is missing".
        log: the last lines of its log.
        device: the device of the training.
        limit_bytes: the enforced memory limit, or None.
    """
    killer = f"killed by signal {ending.signal} ({signal_name(ending.signal)})"
    if ending.timed_out:
        return Measurement(ProbeStatus.TIMEOUT, f"killed after {format_duration(ending.wall_seconds)}")
    if ending.ran_out_of_memory:
        return Measurement(
            ProbeStatus.HOST_OUT_OF_MEMORY,
            "killed by the kernel for memory: its control group counted an out-of-memory kill (oom_kill)",
        )
    if ending.server_died:
        died = "the process that starts probes died, and its probe with it"
        return Measurement(ProbeStatus.CRASHED, died, unexplained=True)
    if ending.signal == signal.SIGKILL:
        reason = f"{killer}; nothing shows that memory was the cause"
        return Measurement(ProbeStatus.CRASHED, reason, unexplained=True)
    end = killer if ending.signal else f"ended with exit status {ending.code}"
    log_end = f"; its log ends with {log[-1]!r}" if log else ""
    if not ending.signal and not ending.code:
        return Measurement(ProbeStatus.CRASHED, f"its {unreadable}{log_end}")
    evidence = next((line for line in reversed(log) if _shows_lack_of_memory(line, device, limit_bytes)), None)
    if evidence is None:
        return Measurement(ProbeStatus.CRASHED, f"{end}{log_end}")
    # The budget limits the device's memory, which on a CPU is the host's.
    if device == "cpu" or _DEVICE_OUT_OF_MEMORY in evidence.lower():
        limit = f" under a limit of {format_bytes(limit_bytes)}" if limit_bytes is not None else ""
        return Measurement(ProbeStatus.OUT_OF_MEMORY, f"{end}{limit}; its log has {evidence!r}")
    return Measurement(ProbeStatus.HOST_OUT_OF_MEMORY, f"{end}; its log has {evidence!r}")


def _shows_lack_of_memory(line: str, device: DeviceKind, limit_bytes: int | None) -> bool:
    """Whether a log line reports that memory ran out; on a CPU without a limit, bad_alloc may be an absurd request."""
    if _BAD_ALLOC in line and (device != "cpu" or limit_bytes is not None):
        return True
    return _DEVICE_OUT_OF_MEMORY in line.lower()


def _load_expected(expected: type[ReplyT], job: Job, ending: JobExit, folder: Path) -> ReplyT:
    try:
        reply = load_reply(folder, expected)
    except ExchangeError as error:
        raise _error_with_log(JobLostError, f"The job {job} {_describe_exit(ending, error)}.", folder) from error
    if isinstance(reply, Failure):
        error_class = JobLostError if reply.transient else AutotuneError
        message = f"A job failed with {reply.kind}: {reply.message.rstrip('.')}."
        failure = _error_with_log(error_class, message, folder)
        # Shown by --debug, below the traceback of this process.
        failure.add_note(f"In the process of the job:\n{reply.traceback}")
        raise failure
    return reply


def _describe_exit(ending: JobExit, error: ExchangeError) -> str:
    """Return a description of the end of a job without a readable reply."""
    if ending.timed_out:
        return f"exceeded its time limit and was killed after {format_duration(ending.wall_seconds)}"
    if ending.ran_out_of_memory:
        return "was killed by the kernel because memory ran out"
    if ending.server_died:
        return "was lost: its process died"
    ended = f"signal {ending.signal}" if ending.signal is not None else f"exit status {ending.code}"
    return f"ended with {ended}, and its {error}"


def _error_with_log(error_class: type[AutotuneError], message: str, folder: Path) -> AutotuneError:
    log_lines = "\n".join(f"  {line}" for line in last_lines(folder, _SHOWN_LINES))
    # A temporary folder is gone when the message is read.
    place = "" if is_temporary(folder) else f", {folder / LOG_FILE},"
    return error_class(message, hint=f"Its log{place} ends with:\n{log_lines}")


_READ_BYTES = 16_384
_LINE_CHARACTERS = 300


def last_lines(folder: Path, count: int) -> list[str]:
    """Return up to ``count`` of the last non-blank lines of a job's log; empty without a log."""
    try:
        with (folder / LOG_FILE).open("rb") as log:
            text = read_tail(log, _READ_BYTES)
    except OSError:
        return []
    lines = [hidden(line.strip()) for line in text.splitlines()]
    return [line[:_LINE_CHARACTERS] for line in lines if line][-count:]
