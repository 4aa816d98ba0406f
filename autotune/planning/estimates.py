"""Estimates memory and time of technique combinations on micro-batches, from what was traced so far."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from autotune.core.batch_geometry import BatchGeometry, Shape
from autotune.core.estimate import MemoryEstimate, Origin
from autotune.core.gpu import Gpu
from autotune.core.plan import AllocatorUse
from autotune.core.program import EVALUATE
from autotune.planning.additive.design import Level
from autotune.planning.additive.group import Group, by_micro_batches
from autotune.planning.additive.model import AdditiveModel, Sum
from autotune.planning.cases import Case, CaseList, Cases
from autotune.planning.extrapolation.fit import DEFAULT_USE, Fit
from autotune.planning.extrapolation.forecast import Forecast, Stretch
from autotune.planning.extrapolation.memory import memory_estimate
from autotune.planning.extrapolation.mixing import Table, mixed, mixed_rows
from autotune.planning.extrapolation.series import Levels

COMPOSED_ERRORS = (0.15, 2.0)
"""Errors of composed estimates, as shares: if no interaction is unseen, and if at least one is (:attr:`Sum.unseen`).

Of 28 composed estimates of an 8B shape that were compared with full-size traces (benchmarks/plan/accuracy.md), the 6 of
the first kind were up to 3 % off; half of the 22 others were up to 2.3 % off, and the worst 190 %, where offloading
removes what other choices add.
"""

EXTRAPOLATED_ERRORS: Mapping[float, float] = {inf: 0.75}
"""Errors of extrapolated estimates, as shares, by the most tokens of a row in their traces.

Source: benchmarks/plan/own_sizes.md, by trainer and length: traces of the same combination at other sizes, against
traces at the candidates' own. The worst was 75 % below, with rows of up to 4,573 tokens; too few with shorter rows were
compared for a smaller error there.
"""

Kind = tuple[Origin, float]
"""Class of estimates with one error: the origin, and the longest traced row or the number of unseen interactions."""
_Estimated = tuple[MemoryEstimate, Origin]
_Pair = tuple[Forecast, Forecast]
"""The forecasts of the largest and of a typical micro-batch."""


@dataclass(frozen=True)
class _Source:
    """What the memory of a phase follows from: the traces, the largest shape, and micro-batches of a step."""

    fit: Fit
    worst: Shape
    micro_batches: int


class Estimates:
    """Estimates of technique combinations: extrapolated from their traces, or composed by the additive model.

    Attributes:
        fits: the traced combinations; :meth:`learn` adds to them.
        untraceable: the reason why each combination that failed could not be traced.
    """

    def __init__(self, cases: Cases, layers: int, gpu: Gpu | None, process_bytes: int = 0) -> None:
        self._cases = cases
        self._layers = layers
        self._gpu = gpu
        self._process_bytes = process_bytes
        self.fits: dict[Group, Fit] = {}
        self.untraceable: dict[Group, str] = {}
        self._additive: dict[int | None, AdditiveModel] = {}
        self._known: dict[tuple[Group, Case], _Estimated | None] = {}
        self._forecasts: dict[tuple[Group, Case], _Pair] = {}
        self._tables: dict[tuple[Group, CaseList], Table] = {}
        self._composed: dict[Sum, dict[Case, MemoryEstimate]] = {}
        self._observed: dict[Kind, float] = {}

    def learn(self, interacting: Iterable[Level]) -> None:
        """Use all fits from now on, given which levels may interact."""
        levels, alike = set(interacting), by_micro_batches(self.fits)
        self._additive = {steps: AdditiveModel(groups, levels) for steps, groups in alike.items()}
        self._known.clear()

    def sum(self, group: Group) -> Sum | None:
        """Return the traced combinations that an estimate is composed of: itself alone where it was traced."""
        additive = self._additive.get(group.micro_batches)
        return additive.sum(group) if additive is not None and group not in self.untraceable else None

    def estimate(self, group: Group, geometry: BatchGeometry, use: AllocatorUse) -> _Estimated | None:
        """Return the estimate of a technique combination, or None if there is none."""
        key = (group, (geometry, use))
        if key not in self._known:
            self._known[key] = self._estimate(*key)
        return self._known[key]

    def kind(self, group: Group) -> Kind:
        """Return what the estimates of a combination have their error in common with."""
        if group in self.fits:
            longest = self.fits[group].longest
            return Origin.EXTRAPOLATED, next(most for most in EXTRAPOLATED_ERRORS if longest <= most)
        found = self.sum(group)
        return Origin.COMPOSED, min(found.unseen if found is not None else 0, len(COMPOSED_ERRORS) - 1)

    def error(self, kind: Kind) -> float:
        """Return the error of a kind of estimates, as a share: the largest observed in this run, if that exceeds
        :data:`EXTRAPOLATED_ERRORS` or :data:`COMPOSED_ERRORS`."""
        origin, place = kind
        stated = EXTRAPOLATED_ERRORS[place] if origin is Origin.EXTRAPOLATED else COMPOSED_ERRORS[int(place)]
        return max(stated, self._observed.get(kind, 0.0))

    def compare(self, kind: Kind, estimated: MemoryEstimate, traced: MemoryEstimate) -> None:
        """Record the error of an estimate whose candidate or technique combination has been traced since."""
        off = abs(estimated.device_bytes / traced.device_bytes - 1)
        grown = off > self.error(kind)
        self._observed[kind] = max(off, self._observed.get(kind, 0.0))
        if grown:
            self._known.clear()

    def forecast(self, group: Group, geometry: BatchGeometry, use: AllocatorUse = DEFAULT_USE) -> _Pair:
        """Return the forecasts of the largest and of a typical micro-batch for a traced combination."""
        key = (group, (geometry, use))
        if key not in self._forecasts:
            self._forecasts[key] = self._follow(group, geometry, use)
        return self._forecasts[key]

    def courses(self, group: Group, geometry: BatchGeometry) -> Mapping[Stretch, Sequence[Levels]] | None:
        """Return the bytes of tensors at each moment of a step on the largest micro-batch, by stretch.

        Where the combination was not traced itself, only the peak of each stretch can be added up. None if there is no
        estimate.
        """
        found = self.sum(group)
        if found is None:
            return None
        if group not in self.fits:
            terms = [(self.forecast(term.group, geometry)[0], term.weight) for term in found.terms]
            return {stretch: [levels] for stretch, levels in mixed(terms).stretches.items() if levels}
        stretches = self.forecast(group, geometry)[0].stretches
        sources = self._sources(group, geometry)
        whole = _Source(self.fits[group], geometry.worst, geometry.micro_batches)
        return {
            stretch: source.fit.course(stretch, self._layers, source.worst)
            for stretch in stretches
            for source in (sources.get(stretch[0].phase, whole),)
        }

    def _estimate(self, group: Group, case: Case) -> _Estimated | None:
        if case[1] not in self._cases.uses:
            return None
        found = self.sum(group)
        if found is None or not all(self._covered(term.group, case[0]) for term in found.terms):
            return None
        error = self.error(self.kind(group))
        if group in self.fits:
            return replace(self._memory(self.forecast(group, *case), case), error=error), Origin.EXTRAPOLATED
        # Further traces leave most sums unchanged, so their estimates are kept.
        composed = self._composed.setdefault(found, {})
        if case not in composed:
            composed |= self._composed_at(found, self._cases.of(group, case))
        return replace(composed[case], error=error), Origin.COMPOSED

    def _covered(self, group: Group, geometry: BatchGeometry) -> bool:
        """Return whether figures of a traced combination at the sizes of a geometry follow from its traces."""
        apart = (shape for each in geometry.apart for shape in (each.worst, each.typical))
        return all(self.fits[group].covers(shape) for shape in (geometry.worst, geometry.typical, *apart))

    def _composed_at(self, found: Sum, at: CaseList) -> Mapping[Case, MemoryEstimate]:
        rows = mixed_rows([(self._table(term.group, at), term.weight) for term in found.terms])
        pairs = zip(rows[: len(at.cases)], rows[len(at.cases) :], strict=True)
        return {case: self._memory(pair, case) for case, pair in zip(at.cases, pairs, strict=True)}

    def _table(self, group: Group, at: CaseList) -> Table:
        """Return the forecasts of a traced combination: the largest micro-batches of all cases, then the typical."""
        key = (group, at)
        if key not in self._tables:
            pairs = [self.forecast(group, *case) for case in at.cases]
            self._tables[key] = Table([worst for worst, _ in pairs] + [typical for _, typical in pairs])
        return self._tables[key]

    def _memory(self, pair: Sequence[Forecast], case: Case) -> MemoryEstimate:
        """Return the estimate of a case, with its error left open."""
        worst, typical = pair
        return memory_estimate(worst, typical, case[0].micro_batches, self._gpu, 0.0, self._process_bytes)

    def _follow(self, group: Group, geometry: BatchGeometry, use: AllocatorUse) -> _Pair:
        fit, layers, count = self.fits[group], self._layers, geometry.micro_batches
        worst = fit.forecast(layers, geometry.worst, count, use)
        typical = worst if geometry.typical == geometry.worst else fit.forecast(layers, geometry.typical, count, use)
        per_step = {apart.phase: apart.per_step for apart in geometry.apart}
        for phase, source in self._sources(group, geometry).items():
            largest = source.fit.forecast(layers, source.worst, source.micro_batches, use)
            worst = worst.taking(phase, largest, per_step.get(phase, 0.0))
        for apart in geometry.apart:
            typical = typical.taking(apart.phase, fit.forecast(layers, apart.typical, count, use), apart.per_step)
        return worst, typical

    def _sources(self, group: Group, geometry: BatchGeometry) -> Mapping[str, _Source]:
        """Return, by phase, what the memory of phases that do not run on a micro-batch follows from."""
        fit, evaluation = self.fits[group], geometry.evaluation
        found = {apart.phase: _Source(fit, apart.worst, geometry.micro_batches) for apart in geometry.apart}
        if evaluation is not None:
            beside = self.fits.get(replace(group, layout=evaluation.layout), fit)
            found[EVALUATE] = _Source(beside, evaluation.worst, 1)
        return found
