"""The job ``probe``: runs and measures real training steps of one plan under a memory limit."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import torch
from datasets.config import DATASET_STATE_JSON_FILENAME

from autotune.core.measurement import Measurement, OutOfMemory
from autotune.core.plan import TrainingPlan, allocator_settings
from autotune.core.protocol import ProbeRequest
from autotune.core.status import ProbeStatus
from autotune.errors import InputError
from autotune.step.distributed.group import prepare_rank, wait_for_ranks
from autotune.step.job import JobContext, lacks_space, log_error
from autotune.step.models.loading import load_config, model_class
from autotune.step.run.batches import Batches
from autotune.step.run.failures import classify_error
from autotune.step.run.meters import METERS, Meter
from autotune.step.run.progress import Progress, count_suspensions
from autotune.step.run.timing import estimate_timing
from autotune.step.run.training import OUTPUT_DIRECTORY, train
from autotune.step.trainers import find_adapter


def probe(request: ProbeRequest, context: JobContext) -> Measurement:
    """Train on the worst micro-batch, then on typical batches; an exception becomes the status of the reply.

    Raises:
        InputError: other processes hold memory within the limit, or the rows were removed.
        Exception: a disk is full. Neither error is the candidate's result.
    """
    for rows in filter(None, (request.tokenized_directory, request.evaluation_directory)):
        # A map of datasets that writes its cache at that moment makes the directory again.
        if not (Path(rows) / DATASET_STATE_JSON_FILENAME).is_file():
            raise InputError(f"The tokenised rows in {rows} were removed.", hint="Go on with --resume.")
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
            held_bytes=meter.held_bytes,
            limit_bytes=request.limit_bytes,
        )
        other_causes = meter.other_causes(request.limit_bytes) if request.limit_bytes is not None else ""
    elif classified.status is ProbeStatus.HOST_OUT_OF_MEMORY:
        # Device figures do not apply to the host, which has no limit here.
        out_of_memory = OutOfMemory(progress.phase, requested_bytes=None, held_bytes=None, limit_bytes=None)
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


def set_environment(env: Mapping[str, str]) -> None:
    """Set environment variables; call it before the device is used.

    PyTorch parses the allocator's variables at the first use of a setting (c10/core/AllocatorConfig.h), which may have
    occurred in the parent before the fork. So allocator settings are also applied directly.
    """
    os.environ.update(env)
    if settings := allocator_settings(env):
        torch._C._accelerator_setAllocatorSettings(settings)
