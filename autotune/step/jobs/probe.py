"""The job ``probe``: runs and measures real training steps of one plan under a memory limit."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from datasets.config import DATASET_STATE_JSON_FILENAME

from autotune.confidential import hidden
from autotune.core.jobs.protocol import ProbeRequest
from autotune.core.machine import DeviceKind
from autotune.core.measurement import Measurement, OutOfMemory
from autotune.core.plan import TrainingPlan, allocator_settings
from autotune.core.status import ProbeStatus
from autotune.errors import AutotuneError, InputError, causes
from autotune.step.distributed.group import prepare_rank, wait_for_ranks
from autotune.step.job import JobContext, lacks_space, log_error
from autotune.step.models.loading import load_config, model_class
from autotune.step.run.batches import Batches
from autotune.step.run.meters import METERS, Meter
from autotune.step.run.progress import Progress, count_suspensions
from autotune.step.run.timing import estimate_timing
from autotune.step.run.training import OUTPUT_DIRECTORY, train
from autotune.step.trainers import find_adapter
from autotune.units import format_bytes, parse_size

# In the messages of PyTorch's allocators for CUDA and for a CPU.
_REQUESTED = re.compile(r"[Tt]ried to allocate (\d+(?:\.\d+)? (?:bytes|[KMGT]iB))")
_HOST_MEMORY_MESSAGES = ("can't allocate memory", "Cannot allocate memory", "std::bad_alloc")
_DEVICE_MEMORY_MESSAGES = ("out of memory", "_STATUS_ALLOC_FAILED")
# oneDNN raises these when it cannot allocate memory for generated code, and the interpreter when a thread's stack does
# not fit; both have other causes too, so they count only close to an enforced limit.
_AMBIGUOUS_MESSAGES = (
    "could not create a primitive",
    "could not create a memory",
    "could not execute",
    "can't start new thread",
)
# oneDNN took 19 MiB at its first bfloat16 product (measured with torch 2.13), and takes more for larger layers: a
# process is close to its limit when no more than this is left, or no more than this share of the limit.
_HEADROOM_BYTES = 32 * 2**20
_HEADROOM_SHARE = 1 / 8
_UNSUPPORTED_ERRORS = (ImportError, NotImplementedError, ValueError)
_REASON_LINES = 3
_REASON_CHARACTERS = 400


@dataclass(frozen=True)
class ClassifiedError:
    """The classification of an exception.

    Attributes:
        reason: in words.
        requested_bytes: size of the failed allocation on the device; None if the message lacks it.
    """

    status: ProbeStatus
    reason: str
    requested_bytes: int | None = None


def probe(request: ProbeRequest, context: JobContext) -> Measurement:
    """Train on the worst micro-batch, then on typical batches; an exception becomes the status of the reply.

    Raises:
        InputError: other processes hold memory within the limit, or the rows were removed.
        Exception: a disk is full. Neither error is the candidate's result.
    """
    for rows in filter(None, (request.tokenized_directory, request.evaluation_directory)):
        # A map of datasets that writes its cache at that moment makes the directory again.
        if not (Path(rows) / DATASET_STATE_JSON_FILENAME).is_file():
            raise InputError(f"The tokenised rows in {rows} were removed.", hint="Continue with --resume.")
    set_environment(request.plan.env)
    prepare_rank(request.plan, request.device)
    # Import the architecture's module before the meter takes its baseline.
    model_class(load_config(request.model, find_adapter(request.plan.trainer).head))
    meter = METERS[request.device]()
    progress = Progress(request.schedule, meter, count_suspensions())
    if request.limit_bytes is not None:
        meter.require(request.limit_bytes)
    try:
        if request.limit_bytes is not None:
            meter.limit(request.limit_bytes)
        trainer = train(request, context.folder, progress)
        wait_for_ranks()
    except Exception as error:
        # Lift the limit first: building the reply needs to allocate.
        meter.lift_limit()
        if lacks_space(error):
            raise
        log_error(error)
        measurement = _failed_measurement(error, request, progress, meter, context.sent_seconds)
    else:
        # Time to precompute the reference's log-probabilities (OnTokenizedRows).
        pass_seconds = getattr(trainer, "seconds_per_row", 0.0)
        measurement = _finished_measurement(request.plan, progress, meter, context.sent_seconds, pass_seconds)
    shutil.rmtree(context.folder / OUTPUT_DIRECTORY, ignore_errors=True)
    return measurement


def _finished_measurement(
    plan: TrainingPlan, progress: Progress, meter: Meter, sent_seconds: float, pass_seconds_per_row: float
) -> Measurement:
    batches, step = progress.batches, progress.whole_step
    first, last = progress.first_step_seconds, progress.last_step_seconds
    assert first is not None
    assert last is not None
    timing = asdict(estimate_timing(progress.timed, step))
    error = timing.pop("error")
    # Ranks that share a micro-batch each count their part of it.
    share = plan.data_ranks / plan.launch.processes
    tokens = batches.mean_tokens * step.micro_batches * share
    rows_per_step = batches.rows * step.micro_batches / plan.epochs_of(batches.population)
    return replace(
        meter.peaks(),
        tokens_per_second=tokens / (timing["step_seconds"] + rows_per_step * pass_seconds_per_row),
        tokens_per_second_error=error,
        **timing,
        micro_batches_timed=len(progress.timed.micro_batches),
        tokens_per_step=tokens,
        documents_per_step=batches.mean_documents * step.micro_batches * share,
        rows=batches.population,
        worst_rows=batches.rows,
        worst_tokens=progress.worst_tokens,
        generation_phases=step.phases(progress.timed.generations),
        start_seconds=first - sent_seconds,
        training_seconds=last - first,
        pass_seconds=batches.population * pass_seconds_per_row / plan.data_ranks,
        evaluation_seconds=progress.evaluation_seconds,
        peaks=progress.peaks,
    )


def _failed_measurement(
    error: Exception, request: ProbeRequest, progress: Progress, meter: Meter, sent_seconds: float
) -> Measurement:
    classified = classify_error(
        error,
        began_training=progress.steps_done > 0,
        device=request.device,
        limit_bytes=request.limit_bytes,
        headroom_bytes=meter.headroom_bytes,
    )
    out_of_memory, other_causes = None, ""
    if classified.status is ProbeStatus.OUT_OF_MEMORY:
        out_of_memory = OutOfMemory(
            phase=progress.phase,
            requested_bytes=classified.requested_bytes,
            used_bytes=meter.used_bytes,
            limit_bytes=request.limit_bytes,
        )
        other_causes = meter.other_causes(request.limit_bytes) if request.limit_bytes is not None else ""
    elif classified.status is ProbeStatus.HOST_OUT_OF_MEMORY:
        # Device figures do not apply to the host, which has no limit here.
        out_of_memory = OutOfMemory(progress.phase, requested_bytes=None, used_bytes=None, limit_bytes=None)
    batches: Batches | None = getattr(progress, "batches", None)
    first = progress.first_step_seconds
    return Measurement(
        status=classified.status,
        reason=f"in {progress.phase}: {classified.reason}{other_causes}",
        rows=batches.population if batches is not None else None,
        worst_rows=batches.rows if batches is not None else None,
        worst_tokens=progress.worst_tokens,
        start_seconds=first - sent_seconds if first is not None else None,
        out_of_memory=out_of_memory,
        peaks=progress.peaks,
    )


def classify_error(
    error: Exception,
    *,
    began_training: bool,
    device: DeviceKind,
    limit_bytes: int | None = None,
    headroom_bytes: int | None = None,
) -> ClassifiedError:
    """Classify an exception.

    Args:
        began_training: whether a whole step was completed; unsupported configurations fail earlier.
        device: the device of the training; with a GPU, host memory may run out instead of device memory.
        limit_bytes: the enforced limit, or None.
        headroom_bytes: bytes left below the limit when the exception was raised; None without such a limit.
    """
    reason = _reason(error)
    at_limit = headroom_bytes is not None and headroom_bytes < max(
        _HEADROOM_BYTES, _HEADROOM_SHARE * (limit_bytes or 0)
    )
    cause = next((link for link in causes(error) if _is_out_of_memory(link, at_limit)), None)
    if cause is not None and device != "cpu" and _is_host_memory_error(cause):
        return ClassifiedError(ProbeStatus.HOST_OUT_OF_MEMORY, _reason(cause))
    if cause is not None:
        requested = _requested_bytes(str(cause))
        # CUDA's message also has the allocator's state; that of a CPU has only a place in PyTorch's sources.
        known = device == "cpu" and requested is not None
        text = f"{format_bytes(requested or 0)} could not be allocated" if known else _reason(cause)
        return ClassifiedError(ProbeStatus.OUT_OF_MEMORY, text, requested)
    if isinstance(error, _UNSUPPORTED_ERRORS) and not began_training:
        return ClassifiedError(ProbeStatus.UNSUPPORTED, reason)
    return ClassifiedError(ProbeStatus.CRASHED, reason)


def _is_out_of_memory(error: BaseException, at_limit: bool) -> bool:
    if _is_device_memory_error(error) or _is_host_memory_error(error):
        return True
    return at_limit and isinstance(error, RuntimeError) and any(words in str(error) for words in _AMBIGUOUS_MESSAGES)


def _is_device_memory_error(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in _DEVICE_MEMORY_MESSAGES)


def _is_host_memory_error(error: BaseException) -> bool:
    """Whether host memory ran out, which on a CPU is the device's."""
    if _is_device_memory_error(error):
        return False
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    return any(words in str(error) for words in _HOST_MEMORY_MESSAGES)


def _requested_bytes(text: str) -> int | None:
    match = _REQUESTED.search(text)
    return parse_size(match[1].replace("bytes", "B")) if match is not None else None


def _reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()][:_REASON_LINES]
    kind = [] if isinstance(error, AutotuneError) else [type(error).__name__]
    parts = [*kind, *([hidden(" ".join(lines))] if lines else [])]
    return ": ".join(parts)[:_REASON_CHARACTERS]


def set_environment(env: Mapping[str, str]) -> None:
    """Set environment variables; call it before the device is used.

    PyTorch parses the allocator's variables at the first use of a setting (c10/core/AllocatorConfig.h), which may have
    occurred in the parent before the fork. So allocator settings are also applied directly.
    """
    os.environ.update(env)
    if settings := allocator_settings(env):
        torch._C._accelerator_setAllocatorSettings(settings)
