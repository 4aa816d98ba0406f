"""Builds a real trainer from a plan, with only the changes that a probe needs, trains on its batches, and evaluates."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from datasets import Dataset, load_from_disk

from autotune.core.blocks import block_rows
from autotune.core.plan import TrainingPlan
from autotune.core.program import EVALUATE
from autotune.core.protocol import ProbeRequest
from autotune.step.data.profile import grouped_heads
from autotune.step.distributed.group import EngineCheck, join
from autotune.step.distributed.state import on_device
from autotune.step.models.loading import load_processor, loaded_model
from autotune.step.objects import config, model_makers, peft_config, quantization_config
from autotune.step.rows import TIMED, Counts, spread
from autotune.step.run.batches import StepSize, plan_batches
from autotune.step.run.followed import followed
from autotune.step.run.progress import Progress
from autotune.step.run.saving import save
from autotune.step.run.timing import WholeStep
from autotune.step.run.worst import worst_order
from autotune.step.trainers import adapter
from autotune.step.trainers.base import Adapter, Drawing
from autotune.techniques.attention import FLEX, unmasked_may_need_more
from autotune.trainers import find_trainer

OUTPUT_DIRECTORY = "output"
"""The trainer's output directory in the job's folder; no tensors are saved to it."""


def train(request: ProbeRequest, folder: Path, progress: Progress) -> Any:
    """Build the trainer of a plan, train until the schedule is satisfied, evaluate and save; return the trainer.

    Raises:
        Exception: any error of TRL or its dependencies.
    """
    known = adapter(request.plan.trainer)
    rows = known.cut(load_from_disk(request.tokenized_directory), request.plan)
    trainer = build_trainer(request, rows, folder, progress)
    step = step_size(request.plan, known.drawing(trainer))
    packed_from = len(rows) if known.packs(trainer.args) else None
    # Ranks draw typical rows of their own, but for those that share a micro-batch, which have successive numbers
    # (accelerate's data_loader.py, prepare_data_loader); the worst ones meet, as they may in training.
    ranks = request.plan.data_ranks
    seed = request.seed + trainer.args.process_index * ranks // request.plan.launch.processes
    drawn_from = known.sizes(trainer), step, known.collation(trainer), request.schedule, seed, packed_from
    compiled, unmasked = request.plan.model.get("attn_implementation") == FLEX, False
    if request.device == "cuda":
        grouped = grouped_heads(trainer.model.config.get_text_config())
        unmasked = unmasked_may_need_more(request.plan, torch.cuda.get_device_capability(), grouped=grouped)
    # What is generated is of another size each time.
    rehearsed = request.device == "cuda" and not known.generating
    batches = plan_batches(*drawn_from, compiled=compiled, unmasked=unmasked, rehearsed=rehearsed)
    # Each for every rank: accelerate deals them out in turn (``BatchSamplerShard``), so that each gets its own.
    dealt = batches.order.repeat(ranks, axis=0), batches.is_worst.repeat(ranks)
    trainer.train_dataset = known.arranged(trainer, *dealt)
    trainer.args.max_steps = batches.steps
    # Trainers that generate count them.
    trainer.left_out = step.micro_batches - batches.step_micro_batches
    progress.batches = batches
    generations = step.micro_batches / step.drawn.uses if known.generating else 0.0
    tokens = batches.mean_tokens * step.micro_batches * ranks
    share, special = known.run_share(trainer), -1 if request.plan.in_group else 0
    progress.whole_step = WholeStep(step.micro_batches, batches.mean_collated, generations, share, tokens, special)
    trainer.train()
    if trainer.eval_dataset is not None and not request.schedule.timing_only:
        progress.evaluation_seconds = _evaluate(trainer, known, progress, ranks)
    if request.schedule.saves:
        save(trainer, progress)
    return trainer


def step_size(plan: TrainingPlan, drawing: Drawing | None = None) -> StepSize:
    """Return the rows and micro-batches of an optimizer step, which every plan contains."""
    return StepSize(plan.rows, plan.micro_batches, drawing)


def build_trainer(request: ProbeRequest, rows: Dataset, folder: Path, progress: Progress) -> Any:
    """Return the trainer, its model and its data, ready to train."""
    plan, source, known = request.plan, request.model, adapter(request.plan.trainer)
    progress.program = find_trainer(plan.trainer).program(plan)
    in_step = step_size(plan).run(whole=request.schedule.whole_steps)
    # The number of steps is set later: the batches are chosen after the trainer has packed and dropped rows.
    overrides = {**run_arguments(1, folder), **known.derived(plan), "gradient_accumulation_steps": in_step}
    # Before any model: the trainer's arguments set accelerate's device, and the engine that shares weights out.
    join(plan, request.device)
    configure = partial(config, plan, **overrides)
    arguments = on_device(torch.device("cpu"), plan, configure) if request.device == "cpu" else configure()
    loading: dict[str, Any]
    building: AbstractContextManager[object] = nullcontext()
    if source.init == "pretrained" and find_trainer(plan.trainer).loads_by_name:
        arguments.model_init_kwargs["revision"] = source.revision
        model: Any = source.name
        loading = {"quantization_config": quantization_config(plan)}
    else:
        kwargs, arguments.model_init_kwargs = arguments.model_init_kwargs, None
        load = partial(loaded_model, device=request.device, head=known.head)
        make_model, make_further = model_makers(plan, source, kwargs, load)
        model = make_model()
        loading, building = {"processing_class": load_processor(source, known.processor)}, known.building(make_further)
    evaluated = None
    if request.evaluation_directory is not None and plan.evaluates:
        evaluated = known.cut(load_from_disk(request.evaluation_directory), plan)
    with building:
        trainer = followed(known, plan, progress)(
            model=model,
            args=arguments,
            train_dataset=rows,
            eval_dataset=evaluated,
            peft_config=peft_config(plan),
            callbacks=[progress],
            **loading,
            **known.arguments(plan),
        )
    known.watch(trainer, progress.inside)
    trainer.add_callback(EngineCheck(trainer, plan))
    return trainer


def run_arguments(steps: int, folder: Path) -> dict[str, object]:
    """Return the trainer arguments that a run on chosen rows overrides: number of steps, order, outputs."""
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


def _evaluate(trainer: Any, known: Adapter, progress: Progress, ranks: int) -> float:
    """Evaluate as TRL does during training, which is a phase of its own, and return the seconds for all rows.

    The optimizer's state exists by then. The largest micro-batches are made of the longest rows, so none that the
    loader builds from neighbouring rows needs more.

    Args:
        ranks: processes that evaluate micro-batches of their own.
    """
    rows, count = trainer.eval_dataset, rows_at_once(trainer, known)
    copies = known.evaluation_drawing(trainer).copies
    with as_trained_on(trainer, count):
        sizes, collation = known.sizes(trainer), known.collation(trainer)
        worst = np.stack(worst_order(sizes, count, collation))
        # As the loader makes them, of neighbouring rows.
        blocks = block_rows(len(rows), count)
        tokens = collation.tokens(sizes, blocks)
        places = spread(tokens, TIMED)
        sample = blocks[places]
        # Each for every rank: accelerate deals them out in turn (``BatchSamplerShard``), so that each gets its own.
        largest, timed = (
            known.arranged(
                trainer,
                order.repeat(copies, axis=1).repeat(ranks, axis=0),
                np.full(len(order) * ranks, fill_value=order is worst),
            )
            for order in (worst, sample)
        )
    with progress.inside(EVALUATE):
        trainer.eval_dataset = largest
        # As in training, which ends where the metric that it is to compare is none of these.
        trainer._determine_best_metric(trainer.evaluate(), None)
        trainer.eval_dataset = timed
        progress.evaluated_seconds.clear()
        # It ends with the losses on the host, so the device is done.
        started = time.monotonic()
        trainer.evaluate()
        seconds = time.monotonic() - started
    trainer.eval_dataset = rows
    # A last micro-batch with fewer rows repeats them here.
    own = tokens.sum() * len(rows) / blocks.size / ranks
    return whole_evaluation(seconds, progress.evaluated_seconds, tokens[places], own)


def whole_evaluation(seconds: float, ended: Sequence[float], tokens: Counts, whole: float) -> float:
    """Return the seconds of an evaluation on all tokens, by those of one on some micro-batches.

    The rest of its time, such as the start and the end of processes that load rows, is counted once.

    Args:
        ended: when each of them ended.
        tokens: of each of them, as in ``whole``.
    """
    rate = seconds / tokens.sum()
    if len(ended) == len(tokens) > 1:
        rate = (ended[-1] - ended[0]) / tokens[1:].sum()
    return float(max(0.0, seconds - rate * tokens.sum()) + rate * whole)


def rows_at_once(trainer: Any, known: Adapter) -> int:
    """Return the rows of the dataset in an evaluation's largest micro-batch."""
    return min(known.evaluation_drawing(trainer).rows, len(trainer.eval_dataset))


@contextmanager
def as_trained_on(trainer: Any, rows: int) -> Iterator[None]:
    """Replace the trainer's rows by those to evaluate on, so many at once, for adapters that read them."""
    with (
        mock.patch.object(trainer, "train_dataset", trainer.eval_dataset),
        mock.patch.object(trainer.args, "per_device_train_batch_size", rows),
    ):
        yield
