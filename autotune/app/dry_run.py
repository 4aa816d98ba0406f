"""The use case of ``autotune dry-run``: runs a training command for a few steps on null GPUs, and judges the result."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.app.arguments import DryRunArguments, check_range, command_words, time_limit
from autotune.app.planned import planned_machine
from autotune.app.public import signature_from
from autotune.confidential import hidden_values, hidden_words, secrets_in
from autotune.core.documents.dry_run import (
    CommandExit,
    DryOutcome,
    DryRun,
    FailedAllocation,
    ProcessRecord,
    UnsupportedCall,
)
from autotune.core.events import StageStarted
from autotune.core.files.codec import decode, encode
from autotune.core.files.scratch import scratch_folder
from autotune.errors import InputError
from autotune.inspection.command_line import read_command_line
from autotune.inspection.yaml_file import read_yaml
from autotune.nullgpu.command import CommandResult, run
from autotune.nullgpu.devices import NullDevice, null_device
from autotune.reporting.words import short_path
from autotune.units import format_bytes, plural
from autotune.userconfig.launch import default_file, likely_gpus
from autotune.userconfig.written import WrittenConfig

_MAX_GPUS = 16
# Errors of accelerate's launcher and torchrun after a process of the script has failed.
_LAUNCHER_ERRORS = ("CalledProcessError", "ChildFailedError")
_UNCOUNTED = "Not counted: NCCL's buffers and cuDNN's workspaces; CUDA's context is a figure from a table."


@dataclass(frozen=True)
class DryRunAnswer:
    """The outcome of a dry run, with its reason and the failed allocation that ended it."""

    outcome: DryOutcome
    reason: str = ""
    failed: FailedAllocation | None = None


@signature_from(DryRunArguments)
def dry_run(args: DryRunArguments) -> DryRun:
    """Run a few steps of a training command on null GPUs, which count memory and compute nothing; no GPU is needed.

    The command runs unchanged, with the Python or launcher that it names, whose environment needs PyTorch's CUDA build.
    Its output goes to stderr. It is ended after the last step; until then, its side effects are real. The ``outcome``
    of the result is whether it fits.

    Raises:
        InputError: an argument cannot be used, or the environment lacks the requirements of null GPUs.
        AutotuneError: the library of the null GPUs could not be built.
    """
    began, steps = time.monotonic(), args.steps
    command = command_words(args.command)
    if not command:
        raise InputError("There is no command to run.", hint="Write it after --, as in -- python train.py.")
    check_range("--steps {}", steps)
    seconds = time_limit(args.timeout)
    count = args.num_processes if args.num_processes is not None else _gpus_needed(command)
    if not 1 <= count <= _MAX_GPUS:
        raise InputError(f"{count} null GPUs are not possible.", hint=f"A machine has 1 to {_MAX_GPUS} null GPUs.")
    device = _device(args.gpu)
    program = " ".join(hidden_words(command)[:3])
    args.listener(StageStarted(f"Running {program} on {plural(count, 'null GPU')} of {format_bytes(device.total)}"))
    with scratch_folder() as folder:
        ran = run(
            command, device, count, Path(folder), steps=steps, as_shuffled=args.as_shuffled, timeout_seconds=seconds
        )
    known = secrets_in(command) | secrets_in(dict(os.environ))
    shown = (decode(ProcessRecord, hidden_values(encode(each), known)) for each in ran.processes)
    ran = dataclasses.replace(ran, processes=tuple(shown))
    result = answer(ran, count, steps)
    used_bytes, spare_bytes = _most(ran.processes, result.failed)
    return DryRun(
        outcome=result.outcome,
        headline=headline(result, used_bytes, spare_bytes),
        reason=result.reason,
        command=hidden_words(command),
        gpu=device.name,
        gpus=count,
        total_bytes=device.total,
        steps=steps,
        used_bytes=used_bytes,
        spare_bytes=spare_bytes,
        failed=result.failed,
        processes=tuple(each for each in ran.processes if each.uses_cuda),
        refused=ran.refused,
        notes=tuple(_notes(ran, result, steps)),
        ending=ran.ending,
        wall_seconds=time.monotonic() - began,
    )


def answer(ran: CommandResult, count: int, steps: int) -> DryRunAnswer:
    """Return the result of a command that has ended.

    Args:
        count: number of null GPUs.
        steps: requested number of optimizer steps.
    """
    using = [each for each in ran.processes if each.uses_cuda]
    ranks = max((each.local_ranks for each in ran.processes), default=1)
    if ranks > count:
        reason = f"it starts {ranks} processes on {plural(count, 'null GPU')}; give --num-processes {ranks}"
        return DryRunAnswer(DryOutcome.CANNOT_RUN, reason)
    if ran.refused:
        return DryRunAnswer(DryOutcome.UNKNOWN, f"the script uses {_functions_text(ran.refused)}")
    failed = _fatal_allocation(ran)
    if failed is not None:
        return DryRunAnswer(DryOutcome.DOES_NOT_FIT, failed=failed)
    taken = min((each.steps for each in using if each.loaders or each.steps), default=0)
    if ran.ending.timed_out:
        return DryRunAnswer(DryOutcome.UNKNOWN, f"--timeout ended it after {taken} of {steps} steps")
    errors = [each.error for each in ran.processes if each.error is not None]
    error = min(errors, key=lambda each: each.kind in _LAUNCHER_ERRORS, default=None)
    all_stopped = len({each.rank for each in using if each.ended == "stopped"}) >= ranks
    if ran.ending.code != 0 and not all_stopped:
        what = f"{error.kind}: {error.message}" if error is not None else _exit_text(ran.ending)
        if not any(each.spans for each in using):
            return DryRunAnswer(DryOutcome.CANNOT_RUN, f"the command failed before it used memory of a GPU: {what}")
        return DryRunAnswer(DryOutcome.UNKNOWN, f"the script failed after {taken} of {steps} steps: {what}")
    if not using:
        return DryRunAnswer(DryOutcome.UNKNOWN, "the command used no GPU through PyTorch")
    if not taken:
        return DryRunAnswer(DryOutcome.UNKNOWN, "the script ended without a step of a PyTorch optimizer")
    if not any(each.spans for each in using):
        reason = "PyTorch's caching allocator was not used; that of CUDA (cudaMallocAsync) is not followed"
        return DryRunAnswer(DryOutcome.UNKNOWN, reason)
    return _judge_batches(using)


def headline(result: DryRunAnswer, held: int | None, spare: int | None) -> str:
    """Return the answer in one line."""
    if result.failed is not None:
        place = result.failed.place
        at = f" at {short_path(Path(place.file))}:{place.line}" if place.file else ""
        # The size of a library's own request to CUDA is unknown.
        size = result.failed.requested_bytes
        request = f", {format_bytes(size)} requested" if size else ""
        when = f"in step {result.failed.step}" if result.failed.step else "before the first batch"
        return f"{result.outcome.value}: out of memory {when}{at}{request}"
    if result.outcome in (DryOutcome.FITS, DryOutcome.BATCHES_FIT) and held is not None and spare is not None:
        return f"{result.outcome.value}: at most {format_bytes(held)} of {format_bytes(held + spare)} used"
    return f"{result.outcome.value}: {result.reason}"


def _judge_batches(using: Sequence[ProcessRecord]) -> DryRunAnswer:
    """Return whether the completed batches represent all later ones."""
    loaders = [loader for each in using for loader in each.loaders]
    if not loaders:
        return DryRunAnswer(DryOutcome.BATCHES_FIT, "no PyTorch DataLoader was used, so a larger batch may come")
    other = next((loader for loader in loaders if not loader.ordered), None)
    if other is None:
        return DryRunAnswer(DryOutcome.FITS)
    reason = f"a larger batch may come from a DataLoader whose order was not changed: {other.reason}"
    if other.order == "as shuffled":
        reason = "rows came as the script shuffles them, so a larger batch may come"
    return DryRunAnswer(DryOutcome.BATCHES_FIT, reason)


def _fatal_allocation(ran: CommandResult) -> FailedAllocation | None:
    """Return the failed allocation that ended the command; None if there was none, or the script went on."""
    # A command ended by the time limit or killed by the kernel had survived its failed allocations. A library without
    # memory aborts: signal 6.
    ended_from_outside = ran.ending.timed_out or ran.ending.signal == signal.SIGKILL
    # A process that passes on the error of another has no failed allocation of its own (torch.multiprocessing.spawn).
    for each in sorted(ran.processes, key=lambda each: not each.failed_allocations):
        of_memory = each.error is not None and each.error.out_of_memory
        died = not each.ended and ran.ending.code != 0 and not ended_from_outside
        if each.failed_allocations and (of_memory or died or (each.ended == "finished" and ran.ending.code)):
            return each.failed_allocations[-1]
        if of_memory and each.error is not None:
            # A library's own request to CUDA failed.
            return FailedAllocation(each.steps + 1, 0, 0, 0, 0, 0, each.error.place)
    return None


def _most(processes: Sequence[ProcessRecord], failed: FailedAllocation | None) -> tuple[int | None, int | None]:
    """Return the peak memory of the fullest GPU and the memory that it leaves free, in bytes.

    A failed request is counted in the peak, so that the free memory is negative.
    """
    spans = [span for each in processes for span in each.spans]
    if failed is not None and failed.requested_bytes:
        total = max((span.total_bytes for span in spans), default=None)
        spare = failed.free_bytes - failed.requested_bytes
        return None if total is None else total - spare, spare
    fullest = max(spans, key=lambda span: span.used_bytes, default=None)
    return (None, None) if fullest is None else (fullest.used_bytes, fullest.total_bytes - fullest.used_bytes)


def _notes(ran: CommandResult, result: DryRunAnswer, steps: int) -> Iterator[str]:
    using = [each for each in ran.processes if each.uses_cuda]
    caught = sum(len(each.failed_allocations) for each in using)
    if caught and result.failed is None:
        yield f"{plural(caught, 'request')} for memory failed, but the script or a library caught the error."
    fits = result.outcome in (DryOutcome.FITS, DryOutcome.BATCHES_FIT)
    taken = max((each.steps for each in using), default=0)
    if fits and taken < steps:
        yield f"The script ended by itself after {taken} of {steps} steps."
    loaders = dict.fromkeys(loader for each in using for loader in each.loaders)
    for loader in loaders:
        if loader.ordered:
            named = f"{loader.field}, " if loader.field else ""
            text = " The row with the most text need not have the most tokens." if "text" in loader.unit else ""
            yield (
                f"Each batch had the largest of {loader.rows:,} rows, up to {loader.largest:,} {loader.unit}"
                f" ({named}measured before any cutting by the script).{text}"
            )
    if fits:
        yield _UNCOUNTED


def _gpus_needed(command: Sequence[str]) -> int:
    """Return the number of GPUs that a command needs; 1 if its words and files do not determine it."""
    try:
        found = read_command_line(command, anywhere=True)
        file = read_yaml(found.config) if found.config is not None else None
        return likely_gpus(WrittenConfig(found, file, found.trainer or "", default_file(found)))
    except InputError:
        return 1


def _device(gpu: str | int | None) -> NullDevice:
    if gpu is not None:
        return null_device(gpu)
    hardware = planned_machine(None).hardware
    return null_device(hardware.name, hardware.memory_bytes)


def _functions_text(refused: Sequence[UnsupportedCall]) -> str:
    """Return the functions that the script used and null GPUs do not support, as text."""
    by_use: dict[str, str] = {}
    for each in refused:
        by_use.setdefault(each.belongs_to, each.function)
    return ", ".join(f"{use} ({function})" for use, function in by_use.items())


def _exit_text(ending: CommandExit) -> str:
    if ending.signal == signal.SIGKILL:
        return "killed by signal 9, as the kernel does where the host's memory runs out"
    return f"killed by signal {ending.signal}" if ending.signal is not None else f"exit code {ending.code}"
