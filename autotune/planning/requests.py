"""Builds the request that traces a training plan at one depth and one micro-batch shape."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.core.batch_geometry import Layout, Shape
from autotune.core.gpu import Gpu
from autotune.core.plan import AllocatorUse, TrainingPlan
from autotune.core.protocol import TraceRequest
from autotune.core.setting import Setting
from autotune.trainers import find_trainer


def trace_request(
    plan: TrainingPlan,
    layout: Layout,
    shape: Shape,
    layers: int,
    setting: Setting,
    gpu: Gpu | None,
    allocators: Sequence[AllocatorUse] = (),
    filled: float = 1.0,
) -> TraceRequest:
    """Return the request that traces a plan at a shape and a depth, which replace the plan's own sizes.

    Args:
        allocators: the ways to use the caching allocator that figures are wanted for, beside PyTorch's default.
        filled: share of the micro-batch's tokens that are not padding, which the loss leaves out; 1 needs the most
            memory.
    """
    trainer = find_trainer(plan.trainer)
    dataset = setting.workload.dataset
    trainable = round(filled * dataset.trainable_tokens / dataset.documents.tokens, 3)
    return TraceRequest(
        plan=trainer.traced_plan(plan, layout, shape),
        model=setting.workload.model_source,
        target=setting.machine.hardware.kind,
        worst=trainer.traced_rows(layout, shape, trainable),
        trainable=trainable,
        layers=layers,
        gpu=gpu,
        allocators=tuple(allocators),
    )
