"""The traces of a training plan at one micro-batch size: at few layers, from which all are extrapolated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autotune.core.batch_geometry import Layout, Shape
from autotune.core.gpu import Gpu
from autotune.core.plan import AllocatorUse, TrainingPlan
from autotune.core.protocol import TraceReply, TraceRequest
from autotune.core.setting import Setting
from autotune.planning.extrapolation.depth import traced_depths
from autotune.planning.extrapolation.fit import Fit
from autotune.planning.extrapolation.shares import with_shares_of
from autotune.techniques.traits import between_layers, impact_in
from autotune.trainers import find_trainer

Point = tuple[int, Shape]
"""A depth in layers, and a micro-batch."""
# Steps of one micro-batch have more rows in it than steps of several; on so few, one trace serves both.
_FEW_ROWS = 2


def depths_of(plan: TrainingPlan, layer_kinds: Sequence[str]) -> tuple[int, ...]:
    """Return the depths at which a plan is traced, given the period of layers over which its techniques repeat."""
    impact = impact_in(plan)
    if impact.needs_all_layers:
        return (len(layer_kinds),)
    return traced_depths(layer_kinds, impact.layer_period, edges=impact.gathers_ahead)


def traced_points(plan: TrainingPlan, layer_kinds: Sequence[str], shape: Shape) -> Mapping[Point, TrainingPlan]:
    """Return the points at which a plan has to be traced for a micro-batch, each with the plan to trace there."""
    few = dict.fromkeys(((depth, shape) for depth in depths_of(plan, layer_kinds)), plan)
    return few | dict.fromkeys(_whole_points(plan, layer_kinds, shape), between_layers(plan))


def fit_of(plan: TrainingPlan, layer_kinds: Sequence[str], shape: Shape, replies: Mapping[Point, TraceReply]) -> Fit:
    """Return what follows for a micro-batch from the traces of a plan at its points."""
    wholes = [replies[point] for point in _whole_points(plan, layer_kinds, shape)]
    few = {depth: replies[depth, shape] for depth in depths_of(plan, layer_kinds)}
    for whole in wholes:
        few = {depth: with_shares_of(whole, reply) for depth, reply in few.items()}
    return Fit(few, len(layer_kinds), edges=impact_in(plan).gathers_ahead)


def _whole_points(plan: TrainingPlan, layer_kinds: Sequence[str], shape: Shape) -> list[Point]:
    """Return the point at which a plan is traced for what it holds between micro-batches; none if layers show it.

    It is that of :func:`~autotune.techniques.traits.between_layers`, for the whole model and a small micro-batch: the
    same one for many plans.
    """
    layers = len(layer_kinds)
    if not impact_in(plan).uneven or depths_of(plan, layer_kinds) == (layers,):
        return []
    return [(layers, replace(shape, rows=min(shape.rows, _FEW_ROWS)))]


def trace_request(
    plan: TrainingPlan,
    layout: Layout,
    shape: Shape,
    layers: int,
    setting: Setting,
    gpu: Gpu | None,
    allocators: Sequence[AllocatorUse] = (),
) -> TraceRequest:
    """Return the request that traces a plan at a shape and a depth, which replace the plan's own sizes.

    Args:
        allocators: the ways to use the caching allocator that figures are wanted for, beside PyTorch's default.
    """
    trainer = find_trainer(plan.trainer)
    dataset = setting.workload.dataset
    trainable = round(shape.filled * dataset.trainable_tokens / dataset.documents.tokens, 3)
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
