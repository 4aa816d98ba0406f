"""Wraps TRL's training loop as a function of a device, for traces on a virtual device or real runs on a CPU."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from accelerate.utils import memory
from transformers import trainer as trainer_module

from autotune.core.gpu import AMPERE, Gpu
from autotune.core.plan import TrainingPlan
from autotune.core.program import CONSTRUCTION, EVALUATE
from autotune.step.distributed.engines import worst_rank
from autotune.step.distributed.zero import engine_on, gradients_of_ranks
from autotune.step.run.saving import save_tensors
from autotune.step.run.virtual_trainer import TracedRows, build_virtual
from autotune.step.run.worst import worst_order
from autotune.step.trainers import adapter
from autotune.step.trainers.base import Adapter
from autotune.virtual import assume, for_real, phase
from autotune.virtual.generation import short_generation
from autotune.virtual.ranks import World
from autotune.virtual.tracing import compiled_again_for
from autotune.virtual.unsupported import COMPILED

_RESULTS = ("loss", "runtime", "samples_per_second", "steps_per_second")
"""The results of every evaluation (transformers' ``Trainer.evaluation_loop``, ``speed_metrics``)."""


@dataclass
class TraceFacts:
    """Figures recorded during a traced training.

    Attributes:
        micro_batches: micro-batches of one optimizer step according to the plan.
        tokens: dataset tokens of each micro-batch, padding excluded; they are all alike.
        worst_rows, worst_tokens: rows and tokens, padding included, of the first micro-batch.
        gradients: see :func:`autotune.step.distributed.engines.worst_rank`.
    """

    micro_batches: int = 1
    tokens: float = 0.0
    worst_rows: int = 0
    worst_tokens: int = 0
    gradients: tuple[int, ...] = ()


def traced_training(
    plan: TrainingPlan,
    model_config: Any,
    processor: Any,
    rows: TracedRows,
    facts: TraceFacts | None = None,
    parent: Path | None = None,
    *,
    steps_alone: bool = False,
) -> Callable[[torch.device], None]:
    """Return a function of a device that trains as TRL does, on random weights, to be run under ``virtual.trace``.

    Args:
        model_config: configuration of the model, as ``AutoConfig`` gives it.
        processor: its tokenizer or processor.
        facts: filled in during the training.
        parent: folder that the training's temporary folder is made in; None: the system's.
        steps_alone: whether it neither evaluates nor saves.
    """

    def run(device: torch.device) -> None:
        with (
            tempfile.TemporaryDirectory(dir=parent) as folder,
            engine_on(device, plan),
            _cache_emptied(device),
            _models_as_before_liger(),
            # Around everything: with FSDP2, the Trainer reads `generate` from the model before it calls it.
            short_generation(),
        ):
            compiled_again_for(rows.again)
            if plan.args.get("torch_compile"):
                assume(COMPILED)
            if rows.chosen is not None:
                assume("no step waits for images to be read and resized")
            known = adapter(plan.trainer)
            with phase(CONSTRUCTION):
                trainer = build_virtual(known, plan, model_config, processor, rows, device, Path(folder))
            trainer.facts = facts or TraceFacts()
            trainer.facts.micro_batches = plan.micro_batches
            known.watch(trainer, phase)
            _choose_batches(trainer, rows, known, plan.data_ranks)
            trainer.train()
            trainer.facts.gradients = gradients_of_ranks(plan, trainer.accelerator)
            if steps_alone:
                return
            if plan.evaluates:
                _evaluate(trainer, known)
            save_tensors(trainer, Path(folder))

    return run


@contextmanager
def _models_as_before_liger() -> Iterator[None]:
    """Restore the modules of transformers' models in which Liger replaces classes and functions, at the end.

    Liger patches them when training begins, after TRL has built the reference model. Without this, reference models of
    later traces in the same process would use Liger's kernels, unlike those of real trainings.
    """
    before: dict[str, dict[str, Any]] = {}
    apply = trainer_module.apply_liger_kernel

    def noted(*args: Any) -> None:
        for name, module in list(sys.modules.items()):
            if name.startswith("transformers.models."):
                before.setdefault(name, dict(vars(module)))
        apply(*args)

    with mock.patch.object(trainer_module, "apply_liger_kernel", noted):
        try:
            yield
        finally:
            for name, names in before.items():
                vars(sys.modules[name]).update(names)


def capability_of(gpu: Gpu | None) -> tuple[int, int]:
    """Return the compute capability by which kernels are selected for a GPU.

    For a GPU that is given by its memory only, it is Ampere's, whose kernels most training GPUs run.
    """
    return (gpu.compute_capability if gpu is not None else None) or AMPERE


def world_of(plan: TrainingPlan, gradients: Sequence[int] = ()) -> World | None:
    """Return the processes of a plan with the one to trace, or None if there is a single one without a group.

    Args:
        gradients: see :func:`autotune.step.distributed.engines.worst_rank`.
    """
    return World(plan.launch.processes, worst_rank(plan, gradients)) if plan.in_group else None


def _cache_emptied(device: torch.device) -> AbstractContextManager[object]:
    """Patch accelerate to empty the cache of a virtual device like that of a GPU: before the first step.

    Emptying it in a step (``torch_empty_cache_steps``) is left to a trace's replays.
    """
    clear = memory.clear_device_cache

    def cleared(garbage_collection: bool = False) -> None:
        clear(garbage_collection)
        getattr(torch, device.type).empty_cache()

    return mock.patch.object(memory, "clear_device_cache", cleared) if device.type != "cpu" else nullcontext()


def _evaluate(trainer: Any, known: Adapter) -> None:
    """Evaluate the largest micro-batch; the evaluations of several differ in a number for each.

    Raises:
        KeyError: the training's ``metric_for_best_model`` is none of the results.
    """
    # Rows to evaluate on are each there once for every copy of it.
    places = np.arange(trainer.args.per_device_train_batch_size) * known.drawing(trainer).copies
    with for_real():
        rows = list(trainer.train_dataset.select(places % len(trainer.train_dataset)))
    with phase(EVALUATE):
        trainer.model.eval()
        trainer.prediction_step(trainer.model, trainer.read_batch(rows), prediction_loss_only=True)
    # `Trainer.evaluate` has these in its result, and TRL's `log` adds its own to them.
    names = (*_RESULTS, *getattr(trainer, "_metrics", {}).get("eval", ()))
    trainer._determine_best_metric({f"eval_{name}": 0.0 for name in names}, None)


def _choose_batches(trainer: Any, rows: TracedRows, known: Adapter, ranks: int) -> None:
    """Make a trainer train on the worst micro-batch of its rows alone.

    Args:
        ranks: to how many ranks accelerate deals the micro-batches out, in turn; each of them gets all of these.
    """
    in_micro_batch, run = trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps
    drawing, sizes = known.drawing(trainer), known.sizes(trainer)
    if rows.chosen is None:
        worst = worst_order(sizes, drawing.rows, known.collation(trainer))[0]
    else:
        worst = np.resize(np.arange(len(trainer.train_dataset)), drawing.rows)
    trainer.facts.tokens = float(sizes.tokens[worst].sum() * in_micro_batch / drawing.rows)
    yielded = np.repeat(worst, drawing.copies)
    # Gradients exist in the last micro-batch that is run, which therefore changes places with the first.
    yielded[: run * in_micro_batch] = np.roll(yielded[: run * in_micro_batch], (run - 1) * in_micro_batch)
    dealt = np.tile(yielded, (run * rows.steps * ranks, 1))
    # TRL counts as if all were run, so that the next step begins with a generation.
    trainer.left_out = -run % drawing.uses
    trainer.train_dataset = known.arranged(trainer, dealt, np.ones(len(dealt), dtype=bool))
