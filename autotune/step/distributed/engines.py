"""Determines the library that distributes a plan's training, and the rank that needs the most memory."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from autotune.core.plan import TrainingPlan
from autotune.techniques.sharding import zero_stage


class Engine(StrEnum):
    """The library that distributes training; values are names for messages."""

    NONE = ""
    DDP = "DDP"
    FSDP2 = "FSDP2"
    DEEPSPEED = "DeepSpeed's ZeRO stage"


def engine_of(plan: TrainingPlan) -> Engine:
    """Return the engine that transformers and accelerate choose for a plan on GPUs."""
    if plan.args.get("deepspeed"):
        return Engine.DEEPSPEED
    if plan.launch.processes == 1:
        return Engine.NONE
    return Engine.FSDP2 if plan.args.get("fsdp") or plan.parallelism else Engine.DDP


def worst_rank(plan: TrainingPlan, gradients: Sequence[int] = ()) -> int:
    """Return the rank with the highest expected memory peak.

    Shards are equal, except FSDP2's shards of a tensor whose size is not a multiple of the number of ranks:
    ``torch.chunk`` gives the first ranks the larger pieces. So it is rank 0, which also gathers checkpoints. With
    ZeRO-1, ranks differ slightly, in either direction (``tests/virtual/test_against_ranks.py``). With ZeRO-2, each rank
    allocates its share of the gradients when the first of them arrives (``stage_1_and_2.py``,
    ``copy_grads_in_partition``). The gradients of the last layers arrive first, while all activations are held, so it
    is the last rank, unless another share is larger by more than the activations that are freed before it arrives.

    Args:
        gradients: gradient elements that each rank of ZeRO-2 holds
            (:func:`autotune.step.distributed.zero.gradients_of_ranks`); the result is then the last of the ranks with
            the largest share. Empty if shares are unknown.
    """
    if zero_stage(plan) != 2:
        return 0
    last = plan.launch.processes - 1
    return max(range(len(gradients)), key=lambda rank: (gradients[rank], rank), default=last)
