"""The traces of a training plan at one micro-batch size: at few layers, from which all are extrapolated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import lcm

from autotune.core.batch_geometry import Layout, Shape
from autotune.core.gpu import Gpu
from autotune.core.images import ChosenRows
from autotune.core.plan import AllocatorUse, TrainingPlan
from autotune.core.program import CONSTRUCTION, OPTIMIZER_STEP
from autotune.core.setting import Setting
from autotune.core.timeline import Occurrence, Section
from autotune.core.traced import TraceReply, TraceRequest
from autotune.core.workload import Workload
from autotune.planning.extrapolation.fit import Fit
from autotune.planning.extrapolation.series import LAYERS_AT_EDGES
from autotune.techniques.traits import between_layers, impact_in
from autotune.trainers import find_trainer

Point = tuple[int, Shape]
"""A depth in layers, and a micro-batch."""
# The first and the last layer run with different tensors held, so a trace needs both.
_FEWEST = 2
_WITH_EDGES = 2 * LAYERS_AT_EDGES
# On so few, one trace serves micro-batches of all sizes.
_FEW_ROWS, _FEW_TOKENS = 2, 64


def depths_of(plan: TrainingPlan, layer_kinds: Sequence[str]) -> tuple[int, ...]:
    """Return the depths at which a plan is traced, given the period of layers over which its techniques repeat."""
    impact = impact_in(plan)
    if impact.needs_all_layers:
        return (len(layer_kinds),)
    return traced_depths(layer_kinds, impact.layer_period, edges=impact.gathers_ahead)


def traced_depths(kinds: Sequence[str], every: int = 1, *, edges: bool = False) -> tuple[int, ...]:
    """Return the one or two depths from which the full depth can be extrapolated.

    Both end with the same kind of layer as the whole model. The deeper one has one more period of the layers' pattern.
    If that is no less than the whole model, only the whole model is traced.

    Example: 32 equal layers give ``(2, 3)``; 32 layers of two alternating kinds give ``(2, 4)``.

    Args:
        kinds: the kind of each layer, in order.
        every: a period that a technique adds, such as checkpointing every second layer.
        edges: whether the first and the last periods are unlike those between, so that there have to be more.
    """
    layers = len(kinds)
    start, period = _repetition(kinds)
    period = lcm(period, every)
    first = start + (layers - start) % period
    while first < max(_FEWEST, start + period * (_WITH_EDGES if edges else 1)):
        first += period
    return (layers,) if first + period >= layers else (first, first + period)


def traced_points(plan: TrainingPlan, layer_kinds: Sequence[str], shape: Shape) -> Mapping[Point, TrainingPlan]:
    """Return the points at which a plan has to be traced for a micro-batch, each with the plan to trace there."""
    few = dict.fromkeys(((depth, shape) for depth in depths_of(plan, layer_kinds)), plan)
    whole = _whole_point(plan, layer_kinds, shape)
    return few if whole is None else {**few, whole: between_layers(plan)}


def fit_of(plan: TrainingPlan, layer_kinds: Sequence[str], shape: Shape, replies: Mapping[Point, TraceReply]) -> Fit:
    """Return what follows for a micro-batch from the traces of a plan at its points."""
    few = {depth: replies[depth, shape] for depth in depths_of(plan, layer_kinds)}
    whole = _whole_point(plan, layer_kinds, shape)
    if whole is not None:
        few = {depth: with_shares_of(replies[whole], reply) for depth, reply in few.items()}
    return Fit(few, len(layer_kinds), edges=impact_in(plan).gathers_ahead)


def _whole_point(plan: TrainingPlan, layer_kinds: Sequence[str], shape: Shape) -> Point | None:
    """Return the point at which a plan is traced for what it holds between micro-batches; None if layers show it.

    It is that of :func:`~autotune.techniques.traits.between_layers`, for the whole model and a small micro-batch. What
    is held between micro-batches does not depend on their size, so that one trace serves all sizes of a plan, and many
    plans. Rows with images are those of the dataset.
    """
    layers = len(layer_kinds)
    if not impact_in(plan).uneven or depths_of(plan, layer_kinds) == (layers,):
        return None
    rows, tokens = min(shape.rows, _FEW_ROWS), min(int(shape.tokens), _FEW_TOKENS)
    if shape.chosen:
        return layers, replace(shape, rows=rows)
    return layers, Shape(rows, tokens, generated=min(int(shape.generated), tokens // 2))


def _repetition(kinds: Sequence[str]) -> tuple[int, int]:
    """Return the layer at which the pattern starts to repeat, and its period; the smallest sum of the two is taken."""
    layers = len(kinds)
    found = (
        (start, period)
        for total in range(1, layers + 1)
        for period in range(1, total + 1)
        for start in (total - period,)
        if all(kinds[index] == kinds[index + period] for index in range(start, layers - period))
    )
    return next(found, (0, layers or 1))


def trace_request(
    plan: TrainingPlan,
    layout: Layout,
    shape: Shape,
    layers: int,
    setting: Setting,
    gpu: Gpu | None,
    allocators: Sequence[AllocatorUse] = (AllocatorUse(),),
    *,
    steps_alone: bool = False,
) -> TraceRequest:
    """Return the request that traces a plan at a shape and a depth, which replace the plan's own sizes.

    Args:
        allocators: the ways to use the caching allocator that figures are wanted for, the plan's own first.
        steps_alone: see :class:`autotune.core.traced.TraceRequest`.
    """
    trainer = find_trainer(plan.trainer)
    dataset = setting.workload.dataset
    share = shape.trained or dataset.trainable_tokens / dataset.documents.tokens
    trainable = round(shape.filled * share, 3)
    return TraceRequest(
        plan=trainer.traced_plan(plan, layout, shape),
        model=setting.workload.model_source,
        target=setting.machine.hardware.kind,
        worst=trainer.traced_rows(layout, shape, trainable),
        trainable=trainable,
        layers=layers,
        gpu=gpu,
        allocators=tuple(allocators),
        steps_alone=steps_alone,
        chosen=chosen_rows(shape, setting.workload),
        compiled_again=trainer.compiled_again(plan, layout, dataset.documents),
    )


def chosen_rows(shape: Shape, workload: Workload) -> ChosenRows | None:
    """Return the rows of a dataset that make a micro-batch of a shape, or None where its tokens are enough."""
    profile = workload.evaluation if shape.evaluated else workload.dataset
    if not shape.chosen or profile is None:
        return None
    return ChosenRows(profile.tokenized_directory, profile.fingerprint, shape.chosen)


_GRADIENT = "gradient"
"""PyTorch's category of what engines keep gradients in."""


def with_shares_of(whole: TraceReply, reply: TraceReply) -> TraceReply:
    """Return a trace of few layers in which gradients between micro-batches are those of the whole model.

    ZeRO-2's buffer of gradients has every tensor whole that the rank's share has a part of, so it changes by jumps with
    the depth, and so does what the update makes of it. The update depends neither on the micro-batch nor on what layers
    compute, so it is taken from the trace of the whole model. In a micro-batch, the buffers of this category are as
    many at each moment as in the trace of few layers, and each is as large as that of the whole model.
    """
    held, wanted = _held(reply), _held(whole)
    updates = {section.part: section for section in whole.sections if section.part.phase in _UPDATES}

    def shared(section: Section) -> Section:
        if section.part in updates:
            return replace(updates[section.part], time=section.time)
        gradients = section.levels.get(_GRADIENT)
        if section.part.occurrence is Occurrence.AFTER or not held or gradients is None:
            return section
        scaled = tuple(round(size * wanted / held) for size in gradients)
        return replace(section, levels={**section.levels, _GRADIENT: scaled})

    return replace(reply, sections=tuple(map(shared, reply.sections)))


_UPDATES = (CONSTRUCTION, OPTIMIZER_STEP)


def _held(reply: TraceReply) -> int:
    """Return the bytes of gradients at the first moment of the update."""
    updates = (section.levels for section in reply.sections if section.part.phase == OPTIMIZER_STEP)
    return next(updates, {}).get(_GRADIENT, (0,))[0]
