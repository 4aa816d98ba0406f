"""Replaces the predicted times of a trace's operators by times measured on the device."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf, log
from typing import Any

from autotune.core.machine import DeviceKind
from autotune.core.step_time import StepTime
from autotune.core.timeline import Section
from autotune.core.traced import TracedOperator, TraceReply, tensors_in
from autotune.errors import AutotuneError
from autotune.planning.tracing.cache import Cache
from autotune.probing.tracing import Traced

Measure = Callable[[Sequence[str]], Mapping[str, float | None]]
"""Measures the seconds of calls on the device, in their order: None for calls that cannot be run; calls without time
left are missing. Raises an `AutotuneError` if nothing can be measured."""

_ALIKE = log(1.4)
"""Logarithm of the ratio of predicted times up to which one operator represents another of the same form."""

_LITTLE = 0.03
"""Share of the traces' time that may remain unmeasured."""

_SHORTEST_SECONDS = 2e-6
"""Predicted time below which operators take a constant time, that of their call."""


@dataclass(frozen=True)
class _Measured:
    """Attributes: the predicted time of a call in seconds, and the measured one; None: it cannot be run by itself."""

    predicted: float
    seconds: float | None


class OperatorTimes:
    """The times of operators on a device.

    An operator is measured unless one of the same form and nearly the same predicted time was; then that one's ratio of
    measured to predicted time is used. An operator that cannot be run by itself keeps its prediction.

    Args:
        key: cache key of the device and its software.

    Attributes:
        failure: a description of why the last measurement failed; empty if it succeeded.
    """

    def __init__(self, device: DeviceKind, measure: Measure, cache: Cache, key: str) -> None:
        self._device = device
        self._measure = measure
        self._cache = cache
        self._key = key
        self.failure = ""
        kept = cache.get(dict[str, _Measured], key)
        self._known: dict[str, _Measured] = dict(kept or {})
        self._forms: dict[str, list[_Measured]] = defaultdict(list)
        for call, measured in self._known.items():
            self._forms[form_of(call)].append(measured)

    def timed(self, found: Sequence[Traced]) -> list[Traced]:
        """Return traces with measured times; missing measurements are run first, together."""
        replies = [traced for traced in found if isinstance(traced, TraceReply)]
        self._learn(replies)
        return [self._replaced(traced) if isinstance(traced, TraceReply) else traced for traced in found]

    def seconds(self, operator: TracedOperator) -> float:
        """Return the time of an operator: measured, derived from another one's, or predicted."""
        nearest, _ = self._nearest(operator)
        if nearest is None or nearest.seconds is None:
            return operator.seconds
        return nearest.seconds * _called(operator.seconds) / _called(nearest.predicted)

    def _learn(self, replies: Sequence[TraceReply]) -> None:
        """Measure the operators that no measured one represents."""
        chosen = self._unlike(replies)
        if self.failure or not chosen:
            return
        try:
            measured = self._measure([operator.call for operator in chosen])
        except AutotuneError as error:
            self.failure = error.message
            return
        for operator in chosen:
            if operator.call in measured:
                found = _Measured(operator.seconds, measured[operator.call])
                self._known[operator.call] = found
                self._forms[form_of(operator.call)].append(found)
        # Failures are not cached: another run may have more memory.
        self._cache.put(self._key, {call: found for call, found in self._known.items() if found.seconds})

    def _unlike(self, replies: Sequence[TraceReply]) -> list[TracedOperator]:
        """Return the operators that no measured one represents, by descending total time."""
        totals: dict[TracedOperator, float] = defaultdict(float)
        for reply in replies:
            for section in reply.sections:
                for number, count in section.operators.items():
                    operator = reply.operators[number]
                    totals[operator] += count * _called(operator.seconds)
        unlike = {operator: total for operator, total in totals.items() if self._nearest(operator)[1] >= _ALIKE}
        left, little = sum(unlike.values()), _LITTLE * sum(totals.values())
        chosen: list[TracedOperator] = []
        asked: dict[str, list[float]] = defaultdict(list)
        for operator in sorted(unlike, key=unlike.__getitem__, reverse=True):
            if left <= little:
                break
            left -= unlike[operator]
            form, predicted = form_of(operator.call), log(_called(operator.seconds))
            if all(abs(each - predicted) >= _ALIKE for each in asked[form]):
                asked[form].append(predicted)
                chosen.append(operator)
        return chosen

    def _nearest(self, operator: TracedOperator) -> tuple[_Measured | None, float]:
        """Return the measured operator of the same form that is nearest in predicted time, and the distance: the
        logarithm of their ratio; infinite without one."""
        own = self._known.get(operator.call)
        if own is not None:
            return own, 0.0
        predicted = log(_called(operator.seconds))
        found = [(abs(log(_called(each.predicted)) - predicted), each) for each in self._forms[form_of(operator.call)]]
        distance, nearest = min(found, key=lambda pair: pair[0], default=(inf, None))
        return nearest, distance

    def _replaced(self, reply: TraceReply) -> TraceReply:
        if not reply.operators:
            return reply
        changed = [self.seconds(operator) - operator.seconds for operator in reply.operators]
        sections = (_with(section, reply.operators, changed, self._device) for section in reply.sections)
        return replace(reply, sections=tuple(sections))


def _called(seconds: float) -> float:
    return max(seconds, _SHORTEST_SECONDS)


def _with(
    section: Section, operators: Sequence[TracedOperator], changed: Sequence[float], device: DeviceKind
) -> Section:
    """Return a section with its time adjusted for each operator's change in seconds."""
    if section.time is None:
        return section
    added: dict[str, float] = defaultdict(float)
    for number, count in section.operators.items():
        added[operators[number].kind] += count * changed[number]
    return replace(section, time=_lengthened(section.time, added, on_host=device == "cpu"))


def _lengthened(time: StepTime, added: Mapping[str, float], *, on_host: bool) -> StepTime:
    """Return a time with seconds added to its figures.

    Args:
        on_host: whether operators run on the host, so that launches do not overlap with execution.
    """
    figures: dict[str, Any] = {name: max(0.0, getattr(time, name) + seconds) for name, seconds in added.items()}
    found = replace(time, **figures)
    if on_host:
        return replace(found, seconds=found.device_seconds + found.launch_seconds)
    return replace(found, seconds=max(found.busiest_seconds, time.seconds + sum(added.values())))


@cache
def form_of(call: str) -> str:
    """Return the size-independent form of a call: operator, dtypes, and order of dimensions.

    For matrix products, the form includes all sizes except the largest, which is usually the number of tokens.
    """
    name, args, named = json.loads(call)
    form: list[object] = [name]
    for shape, stride, dtype, on_device in tensors_in([args, list(named.values())]):
        order = sorted(range(len(shape)), key=lambda at: (stride[at], shape[at]))
        widths = sorted(shape)[:-1] if ".mm." in name or ".addmm" in name or ".bmm." in name else []
        form.append([dtype, on_device, order, [at for at in order if not stride[at]], widths])
    return json.dumps(form)
