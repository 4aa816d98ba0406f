"""Runs TRL's training loop on a given device: the virtual one of a trace, or a real CPU."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
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
from autotune.step.distributed.zero import gradients_of_ranks, traceable_deepspeed
from autotune.step.run.saving import save_tensors
from autotune.step.run.virtual_trainer import TracedRows, build_virtual
from autotune.step.run.worst import worst_order
from autotune.step.trainers import find_adapter
from autotune.step.trainers.base import Adapter, Drawing
from autotune.virtual import assume, on_real_tensors, phase
from autotune.virtual.engine.generation import short_generation
from autotune.virtual.engine.tracing import compiled_again_for
from autotune.virtual.patches.unsupported import COMPILED, HUB_KERNELS
from autotune.virtual.ranks import World


@dataclass
class TraceFacts:
    """Figures recorded during a traced training.

    Attributes:
        micro_batches: micro-batches of one optimizer step of the plan.
        tokens: dataset tokens of a micro-batch, padding excluded; all micro-batches are alike.
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
    """Return a function that trains on a device as TRL does, for ``virtual.trace``.

    Args:
        model_config: configuration of the model, of ``AutoConfig``.
        processor: its tokenizer or processor.
        facts: filled in during the training.
        parent: parent of the training's temporary folder; None: the system's.
        steps_alone: whether to neither evaluate nor save.
    """

    def run(device: torch.device) -> None:
        with (
            tempfile.TemporaryDirectory(dir=parent) as folder,
            traceable_deepspeed(device, plan),
            _empty_cache_of(device),
            _restore_models_after_liger(),
            # Before the trainer is built: with FSDP2, it takes a reference to the model's `generate` early.
            short_generation(),
        ):
            compiled_again_for(rows.again)
            if plan.args.get("torch_compile"):
                assume(COMPILED)
            if plan.entry("args.model_init_kwargs.use_kernels"):
                assume(HUB_KERNELS)
            if rows.chosen is not None:
                assume("no step waits for images to be read and resized")
            adapter = find_adapter(plan.trainer)
            with phase(CONSTRUCTION):
                trainer = build_virtual(adapter, plan, model_config, processor, rows, device, Path(folder))
            trainer.facts = facts or TraceFacts()
            trainer.facts.micro_batches = plan.micro_batches
            adapter.watch(trainer, phase)
            _choose_batches(trainer, rows, adapter, plan.data_ranks)
            evaluated = plan.evaluates and not steps_alone
            if evaluated:
                _prepare_evaluation(trainer, _drawing(trainer, rows, adapter))
                trainer.args.eval_on_start = plan.evaluates_once
            trainer.train()
            trainer.facts.gradients = gradients_of_ranks(plan, trainer.accelerator)
            if steps_alone:
                return
            if evaluated and not plan.evaluates_once:
                trainer.is_in_train = True
                trainer._evaluate(None, None)
            save_tensors(trainer, plan)

    return run


@contextmanager
def _restore_models_after_liger() -> Iterator[None]:
    """Undo Liger's patches of transformers' modules at the end.

    Liger patches them when training begins, after TRL has built the reference model. Without this, reference models of
    later traces in the same process would use Liger's kernels, unlike in real trainings.
    """
    apply_liger = trainer_module.apply_liger_kernel
    with ExitStack() as patched:

        def patch_modules(*args: Any) -> None:
            for name, module in list(sys.modules.items()):
                if name.startswith("transformers.models."):
                    patched.enter_context(mock.patch.dict(vars(module)))
            apply_liger(*args)

        with mock.patch.object(trainer_module, "apply_liger_kernel", patch_modules):
            yield


def capability_of(gpu: Gpu | None) -> tuple[int, int]:
    """Return the compute capability that selects a GPU's kernels; Ampere's if only the GPU's memory is given."""
    return (gpu.compute_capability if gpu is not None else None) or AMPERE


def world_of(plan: TrainingPlan, gradients: Sequence[int] = ()) -> World | None:
    """Return the number of processes of a plan and the rank to trace; None for a single process without a group.

    Args:
        gradients: see :func:`autotune.step.distributed.engines.worst_rank`.
    """
    return World(plan.launch.processes, worst_rank(plan, gradients)) if plan.in_group else None


def _empty_cache_of(device: torch.device) -> AbstractContextManager[object]:
    """Patch accelerate to empty a virtual device's cache before the first step, as it does a GPU's.

    A trace's replays empty it within steps (``torch_empty_cache_steps``).
    """
    clear = memory.clear_device_cache

    def clear_both(garbage_collection: bool = False) -> None:
        clear(garbage_collection)
        getattr(torch, device.type).empty_cache()

    return mock.patch.object(memory, "clear_device_cache", clear_both) if device.type != "cpu" else nullcontext()


def _drawing(trainer: Any, rows: TracedRows, adapter: Adapter) -> Drawing:
    """Return how a trace's rows are drawn.

    Synthetic rows are not copied: TRL does not compare the prompts of a group of completions.
    """
    drawing = adapter.drawing(trainer)
    return drawing if rows.chosen is not None else replace(drawing, rows=drawing.rows * drawing.copies, copies=1)


def _prepare_evaluation(trainer: Any, drawing: Drawing) -> None:
    """Make the trainer evaluate the largest micro-batch, in a phase of its own."""
    evaluate, trainer.eval_dataset = trainer._evaluate, _evaluation_rows(trainer, drawing)
    trainer.args.per_device_eval_batch_size = trainer.args.per_device_train_batch_size

    def in_phase(*given: Any, **named: Any) -> Any:
        with phase(EVALUATE):
            return evaluate(*given, **named)

    trainer._evaluate = in_phase


def _evaluation_rows(trainer: Any, drawing: Drawing) -> Any:
    """Return the rows of the largest micro-batch, the longest completion's last; the dataset has each row per copy."""
    rows, from_end = trainer.train_dataset, np.arange(trainer.args.per_device_train_batch_size)[::-1] * drawing.copies
    with on_real_tensors():
        return rows.select((len(rows) - 1 - from_end) % len(rows))


def _choose_batches(trainer: Any, rows: TracedRows, adapter: Adapter, ranks: int) -> None:
    """Make the trainer's dataset repeat the worst micro-batch of its rows.

    Args:
        ranks: ranks to which accelerate deals micro-batches in turn, so that each rank gets the same ones.
    """
    executed, rows_each = trainer.args.gradient_accumulation_steps, trainer.args.per_device_train_batch_size
    drawing, sizes = _drawing(trainer, rows, adapter), adapter.sizes(trainer)
    if rows.chosen is None:
        worst = worst_order(sizes, drawing.rows, adapter.collation(trainer))[0]
    else:
        worst = np.resize(np.arange(len(trainer.train_dataset)), drawing.rows)
    trainer.facts.tokens = float(sizes.tokens[worst].sum() * rows_each / drawing.rows)
    yielded = np.repeat(worst, drawing.copies)
    trained = np.arange(len(yielded))
    # The last executed micro-batch, in which gradients exist, gets the widest rows, which come first.
    trained[: executed * rows_each] = np.roll(trained[: executed * rows_each], (executed - 1) * rows_each)
    order = np.tile(adapter.yielded(trainer, yielded, trained), (executed * rows.steps * ranks, 1))
    # Makes TRL's count of micro-batches a multiple of those per generation, so that the next step generates.
    trainer.skipped_micro_batches = -executed % drawing.uses
    # Synthetic rows that are completed together have the lengths of their completions. Of others, the widest is padded
    # to the last, unless completions are to be of equal length.
    longest = np.zeros(order.shape, dtype=bool)
    longest[:, -1] = rows.chosen is not None or not adapter.generating
    longest[:] |= rows.chosen is not None and len({parts[-1] for parts in rows.worst}) == 1
    trainer.train_dataset = adapter.select_batches(trainer, order, longest[:, -1], longest)
