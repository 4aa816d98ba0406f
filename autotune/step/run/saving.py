"""Saves a checkpoint without writing its tensors to disk: tensors are only copied to the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import peft.peft_model
import safetensors.torch
import torch
import transformers.modeling_utils
from torch.utils._pytree import tree_leaves

from autotune.core.program import SAVE, SAVE_ELSEWHERE
from autotune.step.distributed.state import acting_as_rank
from autotune.step.run.progress import Progress
from autotune.virtual import phase


def save(trainer: Any, progress: Progress) -> None:
    """Save a checkpoint as TRL does during training, in its own phase."""
    with progress.in_phase(SAVE), without_writing():
        trainer._save_checkpoint(trainer.model, None)


def save_tensors(trainer: Any, folder: Path) -> None:
    """Save the weights and optimizer state of a checkpoint, as phases of a trace.

    With several processes, or DeepSpeed, the engine gathers or shards tensors, so the trainer saves its whole
    checkpoint: as the first rank, which gathers most of it, and again as another rank.
    """
    processes = trainer.accelerator.num_processes
    with without_writing():
        if processes > 1 or trainer.is_deepspeed_enabled:
            for rank, name in tuple(enumerate((SAVE, SAVE_ELSEWHERE)))[:processes]:
                with acting_as_rank(rank), phase(name):
                    trainer._save_checkpoint(trainer.model, None)
            return
        with phase(SAVE):
            trainer.model.save_pretrained(str(folder))
            torch.save(trainer.optimizer.state_dict(), folder / "optimizer.pt")


@contextmanager
def without_writing() -> Iterator[None]:
    """Replace the functions that write tensors by functions that only copy them to the host."""
    with (
        # safetensors' function under each name that writes a checkpoint's weights.
        patch.object(safetensors.torch, "save_file", _copy_together),
        patch.object(transformers.modeling_utils, "safe_save_file", _copy_together),
        patch.object(peft.peft_model, "safe_save_file", _copy_together),
        patch.object(torch, "save", _copy_in_turn),
    ):
        yield


def _copy_together(tensors: Mapping[str, torch.Tensor], *_: Any, **__: Any) -> None:
    """Copy all tensors of a file to the host at once, as safetensors does (``_flatten_as_ptr``)."""
    copies = [tensor.cpu() for tensor in tensors.values()]
    copies.clear()


def _copy_in_turn(document: object, *_: Any, **__: Any) -> None:
    """Copy one tensor after another to the host, as ``torch.save`` does with storages."""
    for leaf in tree_leaves(document):
        if isinstance(leaf, torch.Tensor):
            leaf.cpu()
