"""``activation_offloading``: activations kept in the host's memory between forward and backward."""

from __future__ import annotations

from autotune.core.candidate import Candidate, Choice
from autotune.core.plan import TrainingPlan
from autotune.core.setting import Setting
from autotune.techniques.attention import FLEX
from autotune.techniques.base import OFF, ON, CrashReason, Equipped, Option
from autotune.techniques.gradient_checkpointing import OFFLOAD, SELECTIVE, period
from autotune.techniques.lora import WITH_NEW_HEAD
from autotune.techniques.trace_impact import PlanImpact, TraceImpact

_HELD = 5
"""Activations that stay on the device while they are copied: ``max_fwd_stash_size`` of TRL's ``OffloadActivations``."""


def _impact_in(plan: TrainingPlan) -> PlanImpact:
    """Return the effect on the extrapolation: activations of some layers are on the device while they are copied.

    A checkpointed layer has its input to copy, another one has more than are held.
    """
    checkpointed = plan.args.get("gradient_checkpointing") is not False and period(plan) == 1
    layers = _HELD if checkpointed else 1
    return PlanImpact(edges=layers if plan.args.get("activation_offloading") else 0)


class ActivationOffloading(Equipped):
    """TRL's activation offloading (``trl/models/activation_offloading.py``)."""

    summary = "Moves activations to host memory in the forward pass, and back in the backward pass."
    options = (
        Option(OFF, "activations stay on the device"),
        Option(ON, "activations go to pinned host memory"),
    )
    # TRL 1.16 fails there.
    without_gpu = "it moves activations from an accelerator to the host, and there is no accelerator"
    needs = "an accelerator, and host memory for the activations"
    impact = TraceImpact(patches_libraries=False, in_plan=_impact_in)

    def conflict(self, choice: Choice, candidate: Candidate, setting: Setting) -> str | None:
        """Return a reason if checkpointing offloads too, or if FlexAttention or a fused head fails.

        TRL makes an activation contiguous before it moves it to the host, so the restored copy has other strides.
        FlexAttention's compiled backward pass asserts the original strides of queries, keys and values, which are
        transposed views (contiguous only with a single head). Checkpointed layers recompute them instead.

        The backward pass of TRL's fused head (``trl/kernels/chunked_logprob.py``) gathers a weight that ZeRO-3 shards,
        by DeepSpeed's attributes on the parameter. TRL offloads by PyTorch's saved-tensor hooks, which return another
        tensor of the same data without these attributes.
        """
        if choice != ON:
            return None
        checkpointing = candidate["gradient_checkpointing"]
        if checkpointing == OFFLOAD:
            return "gradient_checkpointing=offload moves the same activations already"
        several = (setting.workload.model.attention_heads or 1) > 1
        if candidate["attention"] == FLEX and checkpointing not in (ON, SELECTIVE) and several:
            # tests/contract/test_trl_rules.py, tests/nullgpu/test_training.py
            return CrashReason(
                f"it restores tensors without their strides, so that attention={FLEX} fails in the backward pass of"
                f" layers without checkpointing; it works with gradient_checkpointing={ON}"
            )
        if candidate.get("sharding") == "zero3" and setting.workload.trainer not in WITH_NEW_HEAD:
            # tests/contract/test_trl_zero3.py
            return CrashReason(
                "TRL's fused head fails with sharding=zero3 and offloaded activations: its backward pass gets a plain"
                " tensor in place of its weight, which DeepSpeed cannot gather"
            )
        return None
