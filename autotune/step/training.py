"""A real trainer from a training plan, changed only in what a probe needs, and made to train on a probe's batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import Dataset, load_from_disk

from autotune.core.protocol import ProbeRequest
from autotune.core.workload import IGNORED_LABEL
from autotune.step.batches import StepSize, plan_batches
from autotune.step.model import load_processor, random_model
from autotune.step.objects import TRAINERS, config, peft_config, quantization_config
from autotune.step.progress import Progress, followed
from autotune.step.rows import row_sizes

OUTPUT_DIRECTORY = "output"
"""Where in the job's folder the trainer would save what it never does."""


def train(request: ProbeRequest, folder: Path, progress: Progress) -> Any:
    """Build the trainer of a plan, train until the schedule is satisfied, and return the trainer.

    Raises:
        Exception: whatever TRL and what it stands on raise.
    """
    plan = request.plan
    rows = training_rows(request)
    trainer = build_trainer(request, rows, folder, progress)
    step = StepSize(trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps)
    packed_from = len(rows) if plan.args.get("packing") else None
    batches = plan_batches(row_sizes(trainer.train_dataset), step, request.schedule, request.seed, packed_from)
    trainer.train_dataset = trainer.train_dataset.select(batches.order.ravel(), keep_in_memory=True)
    progress.batches = batches
    trainer.train()
    return trainer


def training_rows(request: ProbeRequest) -> Dataset:
    """Return the tokenised rows, memory-mapped, cut where the plan cuts them before the trainer sees them.

    Rows that lose all their labels are dropped, as SFTTrainer drops them where it truncates by itself.
    """
    rows = load_from_disk(request.tokenized_directory)
    length = request.plan.truncate_to
    if length is None:
        return rows
    return rows.map(_cut, batched=True, fn_kwargs={"length": length}).filter(_is_trained_on, input_columns=["labels"])


def build_trainer(request: ProbeRequest, rows: Dataset, folder: Path, progress: Progress) -> Any:
    """Return the trainer, its model and its data, ready to train."""
    plan, source = request.plan, request.model
    schedule = request.schedule
    overrides = run_arguments(schedule.worst_steps + schedule.warmup_steps + schedule.max_steps, folder)
    if source.init == "pretrained":
        arguments = config(plan, **overrides)
        arguments.model_init_kwargs["revision"] = source.revision
        model: Any = source.name
        loading = {"quantization_config": quantization_config(plan)}
    else:
        # Its own arguments first: they tell accelerate which device is trained on.
        arguments = config(plan, **overrides)
        kwargs, arguments.model_init_kwargs = arguments.model_init_kwargs, None
        model = random_model(source, kwargs, quantization_config(plan), request.device)
        loading = {"processing_class": load_processor(source)}
    return followed(TRAINERS[plan.trainer].trainer, progress)(
        model=model,
        args=arguments,
        train_dataset=rows,
        peft_config=peft_config(plan),
        callbacks=[progress],
        **loading,
    )


def run_arguments(steps: int, folder: Path) -> dict[str, object]:
    """Return what a probe changes in a trainer's arguments: when it ends, what it draws, and what it leaves behind."""
    return {
        "output_dir": str(folder / OUTPUT_DIRECTORY),
        "max_steps": steps,
        "train_sampling_strategy": "sequential",
        "save_strategy": "no",
        "eval_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def _cut(batch: dict[str, list[list[int]]], length: int) -> dict[str, list[list[int]]]:
    return {name: [values[:length] for values in column] for name, column in batch.items()}


def _is_trained_on(labels: list[int]) -> bool:
    return any(label != IGNORED_LABEL for label in labels)
