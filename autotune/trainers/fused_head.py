"""The base class of trainers whose loss TRL computes in its fused head, which never builds the logits."""

from __future__ import annotations

from dataclasses import replace

from autotune.core.candidate import Candidate
from autotune.core.plan import PASS_ROWS, TrainingPlan
from autotune.core.workload import Workload
from autotune.techniques.base import ON
from autotune.techniques.sharding import ZERO_STAGES, zero_stage
from autotune.trainers.base import Trainer

_OFFLOADING = "activation_offloading"


class FusedHead(Trainer):
    """A trainer that calls its model with TRL's fused head (``add_fused_lm_head`` of ``trl/trainer/utils.py``)."""

    def completed(self, plan: TrainingPlan, workload: Workload) -> TrainingPlan:
        """Return the plan; a pass over the dataset has no more rows at once than the dataset."""
        asked = plan.number(PASS_ROWS)
        args = {PASS_ROWS: min(asked, workload.rows_trained)} if asked is not None else {}
        return replace(plan, args={**plan.args, **args})

    def may_refuse(self, candidate: Candidate) -> bool:
        """Return whether activations are offloaded."""
        return candidate.get(_OFFLOADING) == ON

    def refused(self, plan: TrainingPlan, workload: Workload) -> str | None:
        """Return a reason where ZeRO-3 shares out the weight of the head, and activations are offloaded.

        The head's backward pass (``trl/kernels/chunked_logprob.py``) gathers its weight by what DeepSpeed notes on the
        parameter. PyTorch's hooks on saved tensors, by which TRL offloads activations, hand it another tensor of the
        same data, on which nothing is noted.
        """
        if zero_stage(plan) != ZERO_STAGES["zero3"] or not plan.args.get(_OFFLOADING):
            return None
        return (
            f"TRL's fused head fails with {_OFFLOADING}={ON} and sharding=zero3: its backward pass gets a "
            "tensor back in place of its weight, which DeepSpeed cannot gather"
        )
