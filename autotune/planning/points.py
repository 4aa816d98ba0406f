"""The points at which technique combinations are traced, and the request of each: few layers, few shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autotune.core.batch_geometry import Layout, Typical
from autotune.core.gpu import Gpu
from autotune.core.plan import TrainingPlan
from autotune.core.protocol import TraceReply, TraceRequest
from autotune.planning.additive.group import Group
from autotune.planning.cases import Cases
from autotune.planning.extrapolation.anchors import anchors
from autotune.planning.extrapolation.depth import traced_depths
from autotune.planning.extrapolation.fit import Fit, Point, points
from autotune.planning.extrapolation.shape import Anchors
from autotune.planning.extrapolation.shares import with_shares_of
from autotune.planning.requests import trace_request
from autotune.techniques.traits import between_layers, gathers_ahead, layer_period, needs_all_layers, uneven
from autotune.trainers.problem import TrainerProblem

# Steps of one micro-batch have more rows in it than steps of several; on so few, one trace serves both.
_FEW_ROWS = 2


class GroupPoints:
    """The points of technique combinations, from which all micro-batches of the cases can be extrapolated.

    Args:
        timed: the device whose times are predicted, or None.

    """

    def __init__(self, problem: TrainerProblem, cases: Cases, layer_kinds: Sequence[str], timed: Gpu | None) -> None:
        self._problem = problem
        self._cases = cases
        self._layer_kinds = layer_kinds
        self._timed = timed
        self._anchors: dict[tuple[Layout, int | None, int], Anchors] = {}

    def of(self, group: Group) -> list[Point]:
        """Return the points of a combination."""
        return list(self._traced(group))

    def request(self, group: Group, point: Point) -> TraceRequest:
        """Return the request for the trace of a combination at a point."""
        at = group.layout, point[1], point[0]
        return trace_request(self._traced(group)[point], *at, self._problem.setting, self._timed, self._cases.uses)

    def fit(self, group: Group, replies: Mapping[Point, TraceReply]) -> Fit:
        """Return the fit of a combination to the traces at its points."""
        return fit_of(self._plan(group), self._layer_kinds, self._anchors_of(group), replies)

    def _traced(self, group: Group) -> Mapping[Point, TrainingPlan]:
        return traced_points(self._plan(group), self._layer_kinds, self._anchors_of(group))

    def _anchors_of(self, group: Group) -> Anchors:
        plan = self._plan(group)
        split = plan.launch.processes // plan.data_ranks
        key = group.layout, group.micro_batches, split
        if key not in self._anchors:
            geometries = self._cases.geometries_of(group.micro_batches)
            # Only the largest micro-batch of evaluation is extrapolated to.
            geometries |= {
                replace(each, sizes=(Typical(each.worst),)) for item in geometries if (each := item.evaluation)
            }
            self._anchors[key] = anchors(group.layout, geometries, split)
        return self._anchors[key]

    def _plan(self, group: Group) -> TrainingPlan:
        candidate = self._cases.groups.get(group)
        if candidate is None:
            candidate = next(beside[group] for beside in self._cases.evaluated.values() if group in beside)
        return self._problem.trainer.plan(candidate, self._problem.setting)


def depths_of(plan: TrainingPlan, layer_kinds: Sequence[str]) -> tuple[int, ...]:
    """Return the depths at which a plan is traced, given the period of layers over which its techniques repeat."""
    if needs_all_layers(plan):
        return (len(layer_kinds),)
    return traced_depths(layer_kinds, layer_period(plan), edges=gathers_ahead(plan))


def traced_points(plan: TrainingPlan, layer_kinds: Sequence[str], known: Anchors) -> Mapping[Point, TrainingPlan]:
    """Return the points at which a plan has to be traced, each with the plan to trace there."""
    few = dict.fromkeys(points(depths_of(plan, layer_kinds), known), plan)
    return few | dict.fromkeys(_whole_points(plan, layer_kinds, known), between_layers(plan))


def fit_of(plan: TrainingPlan, layer_kinds: Sequence[str], known: Anchors, replies: Mapping[Point, TraceReply]) -> Fit:
    """Return the fit of a plan to the traces at its points."""
    wholes = [replies[point] for point in _whole_points(plan, layer_kinds, known)]
    few = {point: replies[point] for point in points(depths_of(plan, layer_kinds), known)}
    for whole in wholes:
        few = {point: with_shares_of(whole, reply) for point, reply in few.items()}
    return Fit(known, few, edges=gathers_ahead(plan))


def _whole_points(plan: TrainingPlan, layer_kinds: Sequence[str], known: Anchors) -> list[Point]:
    """Return the point at which a plan is traced for what it holds between micro-batches; none if layers tell it.

    It is that of :func:`~autotune.techniques.traits.between_layers`, for the whole model and a small micro-batch: the
    same one for many plans.
    """
    layers = len(layer_kinds)
    if not uneven(plan) or depths_of(plan, layer_kinds) == (layers,):
        return []
    shapes = [shape for shape in known.shapes if shape.rows >= _FEW_ROWS] or known.shapes
    smallest = min(shapes, key=lambda shape: shape.rows * shape.tokens)
    return [(layers, replace(smallest, rows=min(smallest.rows, _FEW_ROWS)))]
