"""Chooses the numbers of layers at which a training plan is traced, and builds the trace requests."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

from autotune.core.batch_geometry import Layout, Shape
from autotune.core.gpu import Gpu
from autotune.core.images import ChosenRows
from autotune.core.plan import TrainingPlan
from autotune.core.setting import Setting
from autotune.core.traced import TraceRequest
from autotune.planning.extrapolation.series import LAYERS_AT_EDGES
from autotune.techniques.traits import impact_in
from autotune.trainers import find_trainer

# A trace needs a first and a last layer, which have different live tensors.
_MIN_DEPTH = 2
_PERIODS_WITH_EDGES = 2 * LAYERS_AT_EDGES


def depths_of(plan: TrainingPlan, layer_kinds: Sequence[str], *, for_memory: bool = True) -> tuple[int, ...]:
    """Return the depths at which a plan is traced, for memory or for time alone, which is a sum over layers."""
    impact = impact_in(plan)
    if impact.needs_all_layers or (impact.uneven and for_memory):
        return (len(layer_kinds),)
    return traced_depths(layer_kinds, impact.layer_period, edges=impact.gathers_ahead)


def traced_depths(kinds: Sequence[str], extra_period: int = 1, *, edges: bool = False) -> tuple[int, ...]:
    """Return the one or two depths from which the full depth can be extrapolated; the full depth if they reach it.

    Both end with the same kind of layer as the whole model. The deeper one has one more period of the layer pattern.

    Example: 32 equal layers give ``(2, 3)``; 32 layers of two alternating kinds give ``(2, 4)``.

    Args:
        extra_period: period that a technique adds, such as 2 for checkpointing every second layer.
        edges: whether the first and last periods differ from those between, which needs more periods.
    """
    layers = len(kinds)
    start, period = _repetition(kinds)
    period = lcm(period, extra_period)
    first = start + (layers - start) % period
    while first < max(_MIN_DEPTH, start + period * (_PERIODS_WITH_EDGES if edges else 1)):
        first += period
    return (layers,) if first + period >= layers else (first, first + period)


def _repetition(kinds: Sequence[str]) -> tuple[int, int]:
    """Return the layer at which the pattern starts to repeat and its period, with the smallest sum of the two."""
    layers = len(kinds)
    patterns = (
        (start, period)
        for total in range(1, layers + 1)
        for period in range(1, total + 1)
        for start in (total - period,)
        if all(kinds[index] == kinds[index + period] for index in range(start, layers - period))
    )
    return next(patterns, (0, layers or 1))


def trace_request(
    plan: TrainingPlan,
    layout: Layout,
    shape: Shape,
    layers: int,
    setting: Setting,
    gpu: Gpu | None,
    *,
    steps_alone: bool = False,
) -> TraceRequest:
    """Return the request that traces a plan with a micro-batch of a shape, at a depth."""
    trainer = find_trainer(plan.trainer)
    workload, dataset = setting.workload, setting.workload.dataset
    profile = workload.evaluation if shape.evaluated and workload.evaluation is not None else dataset
    chosen = ChosenRows(profile.tokenized_directory, profile.fingerprint, shape.chosen) if shape.chosen else None
    share = shape.trained or dataset.trainable_tokens / dataset.documents.tokens
    trainable = round(shape.filled * share, 3)
    return TraceRequest(
        plan=trainer.traced_plan(plan, layout, shape),
        model=workload.model_source,
        target=setting.machine.hardware.kind,
        worst=trainer.traced_rows(layout, shape, trainable),
        trainable=trainable,
        layers=layers,
        gpu=gpu,
        emptied=plan.empties_cache,
        steps_alone=steps_alone,
        chosen=chosen,
        compiled_again=trainer.compiled_again(plan, layout, dataset.documents),
    )
