"""Which library trains with several processes, by a plan's fields."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from autotune.core.plan import TrainingPlan
from autotune.techniques.sharding import zero_stage


class Engine(StrEnum):
    """The library that shards, replicates and reduces, by its name in messages."""

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
    """Return the rank that holds the most, as far as that is known.

    Shards are equal, but for FSDP2's of a tensor whose size is not a multiple of the number of ranks: ``torch.chunk``
    gives the first ranks the larger pieces. So it is rank 0, which also holds what is gathered for a checkpoint. With
    ZeRO-1 ranks differ by little, in either direction (``tests/virtual/test_against_ranks.py``). With ZeRO-2 each rank
    allocates its share of the gradients when the first of them arrives (``stage_1_and_2.py``,
    ``copy_grads_in_partition``). Those of the last layers arrive first, while all activations are held, so it is the
    last rank, unless another one's share is larger by more than the activations that are freed before it arrives.

    Args:
        gradients: elements of gradients that each rank of ZeRO-2 holds
            (:func:`autotune.step.distributed.zero.gradients_of_ranks`); the result is then the last of the ranks with
            the largest share. Empty where shares are not known.
    """
    if zero_stage(plan) != 2:
        return 0
    last = plan.launch.processes - 1
    return max(range(len(gradients)), key=lambda rank: (gradients[rank], rank), default=last)
