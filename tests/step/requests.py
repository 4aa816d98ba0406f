"""Requests for probes of the small workload, and probes in the test's own process."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.core.jobs.protocol import PrepareRequest, ProbeRequest
from autotune.core.measurement import Measurement, Schedule
from autotune.core.plan import TrainingPlan
from autotune.core.workload import DatasetSource, Init, ModelSource, Workload
from autotune.step.job import JobContext
from autotune.step.jobs.prepare import prepare
from autotune.step.jobs.probe import probe
from autotune.step.run.meters import CpuMeter
from autotune.step.run.progress import Progress
from autotune.step.run.training import train
from tests.small import write_rows, write_small_model

BRIEF = Schedule(warmup_micro_batches=0, min_micro_batches=2, max_micro_batches=2, max_seconds=60.0, target_error=0.01)
"""As short as a probe can be."""


def plan(
    args: Mapping[str, object] | None = None,
    model: Mapping[str, object] | None = None,
    *,
    truncate_to: int | None = None,
    rows: int = 2,
    micro_batches: int = 1,
) -> TrainingPlan:
    """Return a plan for a CPU, in float32; by default batches of 2 rows of at most 64 tokens."""
    sizes = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": micro_batches}
    return TrainingPlan(
        "sft", {"use_cpu": True, "bf16": False, "max_length": 64, **sizes, **(args or {})}, model or {}, truncate_to
    )


def probe_request(
    workload: Workload,
    training_plan: TrainingPlan,
    *,
    schedule: Schedule = BRIEF,
    limit_bytes: int | None = None,
    init: Init = "random",
) -> ProbeRequest:
    """Return the request for a probe of a workload on the CPU."""
    return ProbeRequest(
        plan=training_plan,
        model=ModelSource(workload.model.name, init),
        device="cpu",
        tokenized_directory=workload.dataset.tokenized_directory,
        schedule=schedule,
        limit_bytes=limit_bytes,
    )


def token_workload(folder: Path, lengths: Sequence[int], **config: Any) -> Workload:
    """Prepare pre-tokenised rows of these lengths, for a small model with changes of its configuration."""
    model = write_small_model(folder / "model", weights=False, **config)
    rows = write_rows(folder / "rows.jsonl", [{"input_ids": [7] * length} for length in lengths])
    source = DatasetSource("rows", "json", str(rows))
    request = PrepareRequest(ModelSource(str(model)), source, "sft", str(folder / "tokenized"))
    return prepared_here(request, folder / "prepare")


def prepared_here(request: PrepareRequest, folder: Path) -> Workload:
    """Run a ``prepare`` job in this process."""
    folder.mkdir(parents=True, exist_ok=True)
    return prepare(request, JobContext(folder, time.monotonic()))


def probed_here(request: ProbeRequest, folder: Path) -> Measurement:
    """Run a probe's job in this process, and return what its first rank measured."""
    folder.mkdir(parents=True, exist_ok=True)
    return probe(request, JobContext(folder, time.monotonic()))


def trained(request: ProbeRequest, folder: Path) -> tuple[Progress, Any]:
    """Train as a probe does, and return its records and TRL's trainer."""
    progress = Progress(request.schedule, CpuMeter())
    return progress, train(request, folder, progress)
