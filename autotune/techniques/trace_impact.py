"""Declares a technique's effect on traces, so that plans can share traces and depth can be extrapolated."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from enum import Enum
from math import lcm

from autotune.core.candidate import Choice
from autotune.core.plan import TrainingPlan


class Scope(Enum):
    """The part of a trace that a technique can change."""

    STEP = "step"
    """All operators and tensors of a step."""
    SIZES = "sizes"
    """Only the sizes of micro-batches."""
    ALLOCATOR = "allocator"
    """Only the caching allocator's behaviour for the same allocations."""


@dataclass(frozen=True)
class PlanImpact:
    """The effect of a training plan's techniques on the extrapolation of its traces.

    Attributes:
        layer_period: period of the effect, in layers: 2 if it applies to every second layer.
        uneven: whether a process's share of the gradients may end within a layer: then time is additive over layers,
            but memory is not.
        needs_all_layers: whether a step can only be traced with all layers, since its moments depend on where a
            process's share of the weights starts, or adapters on layer numbers.
        edges: layers at either end that differ from those between, in a model of any size.
        gathers_ahead: number of weights up to which prefetching runs ahead of their use, which adds edges if layers are
            small; 0 if it stays within :attr:`edges`.
        broadcast_bytes: bytes of weights that an engine copies at a time, to send them when it is constructed, however
            many weights there are; 0 if it copies none, or copies all.
        untimed: whether a step on a GPU has no predicted time, since a part of it runs elsewhere.
    """

    layer_period: int = 1
    uneven: bool = False
    needs_all_layers: bool = False
    edges: int = 0
    gathers_ahead: int = 0
    broadcast_bytes: int = 0
    untimed: bool = False

    @classmethod
    def of_all(cls, impacts: Iterable[PlanImpact]) -> PlanImpact:
        """Return the combined impact of several techniques; periods of 2 and 3 layers combine to 6."""
        every = tuple(impacts)
        others = (max(getattr(each, field.name) for each in every) for field in fields(cls)[1:])
        return cls(lcm(*(each.layer_period for each in every)), *others)


@dataclass(frozen=True)
class TraceImpact:
    """The effect of a technique's choices on a trace. The defaults assume the largest effect.

    Attributes:
        scope: the part of a trace that depends on the choice.
        also_sets_sizes: whether the batch geometry depends on it, in addition to its scope.
        monotonic: whether, all else equal, a larger choice never needs less memory, unless it ends accumulation. One
            out-of-memory probe then vetoes the candidates with larger choices.
        patches_libraries: whether it may patch classes or functions of a library until the process ends: a trace
            without it then needs another process. Sizes and the allocator patch nothing.
        frees_weights: returns whether a choice can reduce on-device weight memory.
        in_plan: returns the effect of a plan's entries of the technique on the extrapolation.
        unplanned: effects that probes measure and estimates exclude; empty if there are none.
    """

    scope: Scope = Scope.STEP
    also_sets_sizes: bool = False
    monotonic: bool = False
    patches_libraries: bool = True
    frees_weights: Callable[[Choice], bool] = lambda _: False
    in_plan: Callable[[TrainingPlan], PlanImpact] = lambda _: PlanImpact()
    unplanned: str = ""

    @property
    def sets_only_sizes(self) -> bool:
        """Whether only the sizes of micro-batches depend on the choice."""
        return self.scope is Scope.SIZES

    @property
    def sets_sizes(self) -> bool:
        """Whether the batch geometry depends on the choice."""
        return self.sets_only_sizes or self.also_sets_sizes


SIZES = TraceImpact(Scope.SIZES)
"""Only the sizes of micro-batches change."""
GROWING_SIZES = TraceImpact(Scope.SIZES, monotonic=True)
"""Only the sizes of micro-batches change, and a larger choice never makes them smaller."""
NO_PATCHES = TraceImpact(patches_libraries=False)
"""All of a step may change, but no library is patched."""
