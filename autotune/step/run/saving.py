"""Saves a checkpoint without writing its tensors to disk: they are only copied to the host."""

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
from autotune.step.distributed.state import in_place_of
from autotune.step.run.progress import Progress
from autotune.virtual import phase


def save(trainer: Any, progress: Progress) -> None:
    """Save a checkpoint as TRL does during training, which is a phase of its own."""
    with progress.inside(SAVE), unwritten():
        trainer._save_checkpoint(trainer.model, None)


def save_tensors(trainer: Any, folder: Path) -> None:
    """Save the tensors of a checkpoint, weights and optimizer state, as phases of a trace.

    With several processes, or DeepSpeed, the engine gathers tensors or leaves them as shards, so its whole checkpoint
    is saved: as the first rank, which holds most of it, and again as another rank.
    """
    processes = trainer.accelerator.num_processes
    with unwritten():
        if processes > 1 or trainer.is_deepspeed_enabled:
            for rank, name in tuple(enumerate((SAVE, SAVE_ELSEWHERE)))[:processes]:
                with in_place_of(rank), phase(name):
                    trainer._save_checkpoint(trainer.model, None)
            return
        with phase(SAVE):
            trainer.model.save_pretrained(str(folder))
            torch.save(trainer.optimizer.state_dict(), folder / "optimizer.pt")


@contextmanager
def unwritten() -> Iterator[None]:
    """Replace the functions that write tensors by functions that only copy them to the host."""
    with (
        # The function of safetensors, by the names that write a checkpoint's weights.
        patch.object(safetensors.torch, "save_file", _copied_together),
        patch.object(transformers.modeling_utils, "safe_save_file", _copied_together),
        patch.object(peft.peft_model, "safe_save_file", _copied_together),
        patch.object(torch, "save", _copied_in_turn),
    ):
        yield


def _copied_together(tensors: Mapping[str, torch.Tensor], *_: Any, **__: Any) -> None:
    """Hold all tensors of a file on the host at once, as safetensors does (``_flatten_as_ptr``)."""
    held = [tensor.cpu() for tensor in tensors.values()]
    held.clear()


def _copied_in_turn(document: object, *_: Any, **__: Any) -> None:
    """Copy one tensor after another to the host, as ``torch.save`` does with storages."""
    for leaf in tree_leaves(document):
        if isinstance(leaf, torch.Tensor):
            leaf.cpu()
