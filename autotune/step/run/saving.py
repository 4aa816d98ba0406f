"""Saves a checkpoint or the model without writing its tensors to disk: tensors are only copied to the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import peft.peft_model
import safetensors.torch
import torch
import transformers.modeling_utils
from torch.distributed import checkpoint
from torch.utils._pytree import tree_leaves

from autotune.core.plan import TrainingPlan
from autotune.core.program import SAVE, SAVE_ELSEWHERE
from autotune.step.distributed.state import acting_as_rank
from autotune.step.run.progress import Progress
from autotune.virtual import phase


def save(trainer: Any, plan: TrainingPlan, progress: Progress) -> None:
    """Save as the plan does, in a phase of its own."""
    with progress.in_phase(SAVE), without_writing():
        _save(trainer, plan)


def save_tensors(trainer: Any, plan: TrainingPlan) -> None:
    """Save as the plan does, in a phase of a trace; with several processes, again as another rank.

    The engine gathers or shards tensors, most of them on the first rank. The tokenizer, which has none, is left out.
    """
    ranks = tuple(enumerate((SAVE, SAVE_ELSEWHERE)))[: trainer.accelerator.num_processes]
    with without_writing(), patch.object(trainer, "processing_class", None):
        for rank, name in ranks:
            with acting_as_rank(rank), phase(name):
                _save(trainer, plan)


def _save(trainer: Any, plan: TrainingPlan) -> None:
    """Save a checkpoint as during training, or, without checkpoints, the model as TRL's scripts do after it."""
    if plan.saves_checkpoints:
        trainer._save_checkpoint(trainer.model, None)
    else:
        trainer.save_model()


@contextmanager
def without_writing() -> Iterator[None]:
    """Replace the functions that write tensors by functions that only copy them to the host."""
    with (
        # safetensors' function under each name that writes a checkpoint's weights.
        patch.object(safetensors.torch, "save_file", _copy_together),
        patch.object(transformers.modeling_utils, "safe_save_file", _copy_together),
        patch.object(peft.peft_model, "safe_save_file", _copy_together),
        patch.object(torch, "save", _copy_in_turn),
        # accelerate's function for FSDP2's shards, which are on the host already.
        patch.object(checkpoint, "save", _copy_in_turn),
    ):
        yield


def _copy_together(tensors: Mapping[str, torch.Tensor], *_: Any, **__: Any) -> None:
    """Copy all tensors of a file to the host at once, as safetensors does (``_flatten_as_ptr``)."""
    copies = [tensor.cpu() for tensor in tensors.values()]
    copies.clear()


def _copy_in_turn(state_dict: object, *_: Any, **__: Any) -> None:
    """Copy one tensor after another to the host, as ``torch.save`` does with storages."""
    for leaf in tree_leaves(state_dict):
        if isinstance(leaf, torch.Tensor):
            leaf.cpu()
