"""A real trainer from a training plan, changed only in what a probe needs, and made to train on a probe's batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import Dataset, load_from_disk

from autotune.core.plan import TrainingPlan
from autotune.core.protocol import ProbeRequest
from autotune.core.workload import IGNORED_LABEL
from autotune.step.data.rows import row_sizes
from autotune.step.models.loading import load_processor, random_model
from autotune.step.objects import TRAINERS, config, peft_config, quantization_config
from autotune.step.run.batches import Collation, StepSize, plan_batches
from autotune.step.run.followed import followed
from autotune.step.run.progress import Progress
from autotune.step.run.timing import WholeStep

OUTPUT_DIRECTORY = "output"
"""Where in the job's folder the trainer would save what it never does."""


def train(request: ProbeRequest, folder: Path, progress: Progress) -> Any:
    """Build the trainer of a plan, train until the schedule is satisfied, and return the trainer.

    Raises:
        Exception: whatever TRL and what it stands on raise.
    """
    rows = training_rows(request)
    step = step_size(request.plan)
    trainer = build_trainer(request, rows, folder, progress)
    packed_from = len(rows) if trainer.args.packing else None
    sizes, collation = row_sizes(trainer.train_dataset), collation_of(trainer)
    batches = plan_batches(sizes, step, collation, request.schedule, request.seed, packed_from)
    trainer.train_dataset = trainer.train_dataset.select(batches.order.ravel(), keep_in_memory=True)
    trainer.args.max_steps = batches.steps
    progress.batches = batches
    progress.whole_step = WholeStep(step.micro_batches, batches.mean_collated)
    trainer.train()
    return trainer


def step_size(plan: TrainingPlan) -> StepSize:
    """Return the rows and micro-batches of an optimizer step, which every plan says."""
    rows, micro_batches = plan.args["per_device_train_batch_size"], plan.args["gradient_accumulation_steps"]
    return StepSize(int(str(rows)), int(str(micro_batches)))


def collation_of(trainer: Any) -> Collation:
    """Return how a trainer's collator joins rows."""
    return Collation(flat=trainer.padding_free, multiple=trainer.args.pad_to_multiple_of or 1)


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
    in_step = step_size(plan).run(whole=request.schedule.whole_steps)
    # Its batches, and so the number of its steps, are known once it has packed and dropped rows.
    overrides = {**run_arguments(1, folder), "gradient_accumulation_steps": in_step}
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
    """Return what a run on chosen rows changes in a trainer's arguments: its end, its order, what it leaves."""
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
