"""Builds TRL's trainer for a probe, trains on the chosen batches, evaluates and saves."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from datasets import Dataset, load_from_disk

from autotune.core.files.nested import mapping
from autotune.core.jobs.protocol import ProbeRequest
from autotune.core.plan import EVALUATED_ONCE, TrainingPlan
from autotune.core.program import EVALUATE
from autotune.core.rows.blocks import block_rows
from autotune.step.data.profile import grouped_heads
from autotune.step.distributed.group import join_group
from autotune.step.distributed.state import on_device
from autotune.step.models.loading import load_processor, loaded_model
from autotune.step.objects import config, model_factories, peft_config, quantization_config
from autotune.step.rows import TIMED_MICRO_BATCHES, Counts, quantile_indices
from autotune.step.run.batches import StepSize, plan_batches
from autotune.step.run.instrument import instrumented_class
from autotune.step.run.progress import Progress
from autotune.step.run.saving import save
from autotune.step.run.timing import WholeStep
from autotune.step.run.worst import worst_order
from autotune.step.trainers import find_adapter
from autotune.step.trainers.base import Adapter, Drawing
from autotune.techniques.attention import FLEX, unmasked_may_need_more
from autotune.techniques.sharding import REPORTING

OUTPUT_DIRECTORY = "output"
"""The trainer's output directory in the job's folder; no tensors are saved to it."""


def train(request: ProbeRequest, folder: Path, progress: Progress) -> Any:
    """Build the trainer of a plan, train until the schedule is satisfied, evaluate and save; return the trainer.

    Raises:
        Exception: any error of TRL or its dependencies.
    """
    adapter = find_adapter(request.plan.trainer)
    rows = adapter.cut(load_from_disk(request.tokenized_directory), request.plan)
    trainer = build_trainer(request, rows, folder, progress)
    step = step_size(request.plan, adapter.drawing(trainer))
    packed_from = len(rows) if adapter.packs(trainer.args) else None
    # Each rank draws its own typical rows, except that ranks with successive numbers may share a micro-batch
    # (accelerate's data_loader.py, prepare_data_loader). All ranks run the worst rows, as can happen in training.
    ranks = request.plan.data_ranks
    seed = request.seed + trainer.args.process_index * ranks // request.plan.launch.processes
    inputs = adapter.sizes(trainer), step, adapter.collation(trainer), request.schedule, seed, packed_from
    compiled, unmasked = request.plan.model.get("attn_implementation") == FLEX, False
    if request.device == "cuda":
        grouped = grouped_heads(trainer.model.config.get_text_config())
        unmasked = unmasked_may_need_more(request.plan, torch.cuda.get_device_capability(), grouped=grouped)
    # Generated rows differ in size each time, so a rehearsal prepares no kernels for them.
    rehearse = request.device == "cuda" and not adapter.generating
    batches = plan_batches(*inputs, compiled=compiled, unmasked=unmasked, rehearse=rehearse)
    # accelerate deals micro-batches to the ranks in turn (``BatchSamplerShard``), so each is repeated for every rank.
    order, longest = batches.order.repeat(ranks, axis=0), batches.longest.repeat(ranks, axis=0)
    trainer.train_dataset = adapter.select_batches(trainer, order, batches.is_worst.repeat(ranks), longest)
    trainer.args.max_steps = batches.steps
    # Trainers that generate count micro-batches.
    trainer.skipped_micro_batches = step.micro_batches - batches.step_micro_batches
    progress.batches = batches
    generations = step.micro_batches / step.drawn.uses if adapter.generating else 0.0
    tokens = batches.mean_tokens * step.micro_batches * ranks
    special = -1 if request.plan.in_group else 0
    progress.whole_step = WholeStep(step.micro_batches, batches.mean_collated, generations, tokens, special)
    trainer.train()
    if trainer.eval_dataset is not None and not request.schedule.timing_only:
        progress.evaluation_seconds = _evaluate(trainer, adapter, progress, ranks)
    if request.schedule.saves:
        save(trainer, request.plan, progress)
    return trainer


def step_size(plan: TrainingPlan, drawing: Drawing | None = None) -> StepSize:
    """Return the rows and micro-batches of an optimizer step of a plan."""
    return StepSize(plan.rows, plan.micro_batches, drawing)


def build_trainer(request: ProbeRequest, rows: Dataset, folder: Path, progress: Progress) -> Any:
    """Return the trainer with its model and its data."""
    plan, source, adapter = request.plan, request.model, find_adapter(request.plan.trainer)
    progress.program = adapter.specification.program(plan)
    in_step = step_size(plan).executed(whole=request.schedule.whole_steps)
    # The number of steps is set later: the batches are chosen after the trainer has packed and dropped rows.
    overrides = {**run_arguments(plan, 1, folder), **adapter.derived(plan), "gradient_accumulation_steps": in_step}
    # Before any model: the trainer's arguments set accelerate's device and the engine that partitions weights.
    join_group(plan, request.device)
    configure = partial(config, plan, **overrides)
    arguments = on_device(torch.device("cpu"), plan, configure) if request.device == "cpu" else configure()
    loading: dict[str, Any]
    building: AbstractContextManager[object] = nullcontext()
    if source.init == "pretrained" and adapter.specification.loads_by_name:
        arguments.model_init_kwargs["revision"] = source.revision
        model: Any = source.name
        loading = {"quantization_config": quantization_config(plan)}
    else:
        kwargs, arguments.model_init_kwargs = arguments.model_init_kwargs, None
        load = partial(loaded_model, device=request.device, head=adapter.head)
        make_model, make_further = model_factories(plan, source, kwargs, load)
        model = make_model()
        loading, building = (
            {"processing_class": load_processor(source, adapter.processor)},
            adapter.loading_models_from(make_further),
        )
    evaluated = None
    if request.evaluation_directory is not None and plan.evaluates:
        evaluated = adapter.cut(load_from_disk(request.evaluation_directory), plan)
    with building:
        trainer = instrumented_class(adapter, plan, progress)(
            model=model,
            args=arguments,
            train_dataset=rows,
            eval_dataset=evaluated,
            peft_config=peft_config(plan),
            callbacks=[progress],
            **loading,
            **adapter.arguments(plan),
        )
    # Every trainer's backward pass calls this method; their loss methods differ.
    trainer.accelerator.backward = progress.backward()(trainer.accelerator.backward)
    adapter.watch(trainer, progress.in_phase)
    return trainer


def run_arguments(plan: TrainingPlan, steps: int, folder: Path) -> dict[str, object]:
    """Return the trainer arguments that every probe and trace overrides: number of steps, order, outputs."""
    document = mapping(plan.args.get("deepspeed"))
    quiet = {name: deepcopy(value) for name, value in document.items() if name not in REPORTING}
    return {
        **({"deepspeed": quiet} if quiet else {}),
        "output_dir": str(folder / OUTPUT_DIRECTORY),
        "max_steps": steps,
        "train_sampling_strategy": "sequential",
        "save_strategy": "no",
        "eval_strategy": "no",
        EVALUATED_ONCE: False,
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def _evaluate(trainer: Any, adapter: Adapter, progress: Progress, ranks: int) -> float:
    """Evaluate as TRL does during training, with optimizer state; return the seconds of an evaluation on all rows.

    First runs micro-batches of the longest rows: none that the loader makes of neighbouring rows needs more memory.

    Args:
        ranks: processes that evaluate different micro-batches.
    """
    rows, count = trainer.eval_dataset, evaluation_batch_rows(trainer, adapter)
    copies = adapter.evaluation_drawing(trainer).copies
    with evaluation_rows_as_training(trainer, count):
        sizes, collation = adapter.sizes(trainer), adapter.collation(trainer)
        worst = np.stack(worst_order(sizes, count, collation))
        # The loader makes micro-batches of neighbouring rows.
        blocks = block_rows(len(rows), count)
        tokens = collation.tokens(sizes, blocks)
        positions = quantile_indices(tokens, TIMED_MICRO_BATCHES)
        sample = blocks[positions]
        # accelerate deals micro-batches to the ranks in turn (``BatchSamplerShard``): each is repeated for every rank.
        largest, timed = (
            adapter.select_batches(
                trainer,
                order.repeat(copies, axis=1).repeat(ranks, axis=0),
                np.full(len(order) * ranks, fill_value=order is worst),
            )
            for order in (worst, sample)
        )
    # After training, TRL would cast the model (``bf16_full_eval``).
    with progress.in_phase(EVALUATE), mock.patch.object(trainer, "is_in_train", new=True):
        trainer.eval_dataset = largest
        trainer.evaluate()
        trainer.eval_dataset = timed
        progress.evaluated_seconds.clear()
        # Evaluation ends with a copy of the losses to the host, so the device is synchronised.
        started = time.monotonic()
        trainer.evaluate()
        seconds = time.monotonic() - started
    trainer.eval_dataset = rows
    # Blocks repeat rows to fill a last micro-batch with fewer.
    own_tokens = tokens.sum() * len(rows) / blocks.size / ranks
    return extrapolate_evaluation(seconds, progress.evaluated_seconds, tokens[positions], own_tokens)


def extrapolate_evaluation(seconds: float, end_seconds: Sequence[float], tokens: Counts, whole_tokens: float) -> float:
    """Return the seconds of an evaluation on all tokens, extrapolated from one on some micro-batches.

    Time outside micro-batches, such as to start and end the processes that load rows, counts once.

    Args:
        seconds: time of the evaluation.
        end_seconds: end of each micro-batch.
        tokens: tokens of each micro-batch.
        whole_tokens: tokens of all rows.
    """
    rate = seconds / tokens.sum()
    if len(end_seconds) == len(tokens) > 1:
        rate = (end_seconds[-1] - end_seconds[0]) / tokens[1:].sum()
    return float(max(0.0, seconds - rate * tokens.sum()) + rate * whole_tokens)


def evaluation_batch_rows(trainer: Any, adapter: Adapter) -> int:
    """Return the number of dataset rows in an evaluation's largest micro-batch."""
    return min(adapter.evaluation_drawing(trainer).rows, len(trainer.eval_dataset))


@contextmanager
def evaluation_rows_as_training(trainer: Any, rows: int) -> Iterator[None]:
    """Replace the trainer's rows and batch size by those of evaluation, for methods of adapters that read them."""
    with (
        mock.patch.object(trainer, "train_dataset", trainer.eval_dataset),
        mock.patch.object(trainer.args, "per_device_train_batch_size", rows),
    ):
        yield
