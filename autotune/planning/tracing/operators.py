"""Replaces the predicted times of a trace's operators by times measured on the device."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf, log
from typing import Any

from autotune.core.jobs.traced import TracedOperator, TraceReply, tensors_in
from autotune.core.machine import DeviceKind
from autotune.core.timeline import Section
from autotune.errors import AutotuneError
from autotune.planning.tracing.cache import Cache
from autotune.probing.tracing import Traced

Measure = Callable[[Sequence[str]], Mapping[str, float | None]]
"""Measures the seconds of calls on the device, in their order: None for calls that cannot be run; calls without time
left are missing. Raises an `AutotuneError` if nothing can be measured."""

_MAX_LOG_RATIO = log(1.4)
"""Largest log-ratio of predicted times at which one operator represents another of the same form."""

_UNMEASURED_SHARE = 0.03
"""Share of the traces' time that may remain unmeasured."""

_MIN_CALL_SECONDS = 2e-6
"""Predicted time below which an operator's time is that of its call, a constant."""


@dataclass(frozen=True)
class _Measured:
    """Predicted and measured time of a call, in seconds; None if the call cannot be run by itself."""

    predicted: float
    seconds: float | None


class OperatorTimes:
    """Measured times of operators on a device.

    An operator is measured unless one of the same form and nearly the same predicted time has been: then that one's
    ratio of measured to predicted time applies. An operator that cannot be run by itself keeps its prediction.

    Args:
        key: cache key of the device and its software.

    Attributes:
        failure: the error of the last measurement; empty if it succeeded.
    """

    def __init__(self, device: DeviceKind, measure: Measure, cache: Cache, key: str) -> None:
        self._device = device
        self._measure = measure
        self._cache = cache
        self._key = key
        self.failure = ""
        # The measured times by call, in those of each form.
        self._forms: dict[str, dict[str, _Measured]] = defaultdict(dict)
        for call, measured in (cache.get(dict[str, _Measured], key) or {}).items():
            self._forms[form_of(call)][call] = measured

    def with_measured_times(self, traces: Sequence[Traced]) -> list[Traced]:
        """Return traces with measured times; runs missing measurements first."""
        self._measure_missing([traced for traced in traces if isinstance(traced, TraceReply)])
        return [self._with_times(traced) if isinstance(traced, TraceReply) else traced for traced in traces]

    def seconds(self, operator: TracedOperator) -> float:
        """Return the time of an operator: measured, scaled from another operator's, or predicted."""
        nearest, _ = self._nearest(operator)
        if nearest is None or nearest.seconds is None:
            return operator.seconds
        return nearest.seconds * _call_seconds(operator.seconds) / _call_seconds(nearest.predicted)

    def _measure_missing(self, replies: Sequence[TraceReply]) -> None:
        """Measure the operators that no measured operator represents."""
        operators = self._unrepresented(replies)
        if self.failure or not operators:
            return
        try:
            measured = self._measure([operator.call for operator in operators])
        except AutotuneError as error:
            self.failure = error.message
            return
        for operator in operators:
            if operator.call in measured:
                found = _Measured(operator.seconds, measured[operator.call])
                self._forms[form_of(operator.call)][operator.call] = found
        known = (item for alike in self._forms.values() for item in alike.items())
        # Failures are not cached: another run may have more memory.
        self._cache.put(self._key, {call: found for call, found in known if found.seconds})

    def _unrepresented(self, replies: Sequence[TraceReply]) -> list[TracedOperator]:
        """Return the operators to measure, by descending total time, so that little time stays unmeasured."""
        totals: dict[TracedOperator, float] = defaultdict(float)
        for reply in replies:
            for section in reply.sections:
                for number, count in section.operators.items():
                    operator = reply.operators[number]
                    totals[operator] += count * _call_seconds(operator.seconds)
        candidates = {each: total for each, total in totals.items() if self._nearest(each)[1] >= _MAX_LOG_RATIO}
        remaining, allowed = sum(candidates.values()), _UNMEASURED_SHARE * sum(totals.values())
        chosen: list[TracedOperator] = []
        chosen_times: dict[str, list[float]] = defaultdict(list)
        for operator in sorted(candidates, key=candidates.__getitem__, reverse=True):
            if remaining <= allowed:
                break
            remaining -= candidates[operator]
            form, predicted = form_of(operator.call), log(_call_seconds(operator.seconds))
            if all(abs(each - predicted) >= _MAX_LOG_RATIO for each in chosen_times[form]):
                chosen_times[form].append(predicted)
                chosen.append(operator)
        return chosen

    def _nearest(self, operator: TracedOperator) -> tuple[_Measured | None, float]:
        """Return the measured operator of the same form with the nearest predicted time, and the log-ratio of both."""
        predicted, alike = log(_call_seconds(operator.seconds)), self._forms[form_of(operator.call)]
        if operator.call in alike:
            return alike[operator.call], 0.0
        distances = [(abs(log(_call_seconds(each.predicted)) - predicted), each) for each in alike.values()]
        distance, nearest = min(distances, key=lambda pair: pair[0], default=(inf, None))
        return nearest, distance

    def _with_times(self, reply: TraceReply) -> TraceReply:
        if not reply.operators:
            return reply
        changed = [self.seconds(operator) - operator.seconds for operator in reply.operators]
        sections = (_adjusted_section(section, reply.operators, changed, self._device) for section in reply.sections)
        return replace(reply, sections=tuple(sections))


def _call_seconds(seconds: float) -> float:
    return max(seconds, _MIN_CALL_SECONDS)


def _adjusted_section(
    section: Section, operators: Sequence[TracedOperator], changed: Sequence[float], device: DeviceKind
) -> Section:
    """Return a section with its time adjusted for each operator's change in seconds."""
    if section.time is None:
        return section
    added: dict[str, float] = defaultdict(float)
    for number, count in section.operators.items():
        added[operators[number].kind] += count * changed[number]
    figures: dict[str, Any] = {name: max(0.0, getattr(section.time, name) + more) for name, more in added.items()}
    time = replace(section.time, **figures)
    seconds = max(time.busiest_seconds, section.time.seconds + sum(added.values()))
    if device == "cpu":
        # Operators run on the host, so that launches do not overlap with execution.
        seconds = time.device_seconds + time.launch_seconds
    return replace(section, time=replace(time, seconds=seconds))


@cache
def form_of(call: str) -> str:
    """Return the size-independent form of a call: operator, dtypes, and order of dimensions.

    For matrix products, the form includes all sizes except the largest, which is usually the number of tokens.
    """
    name, args, kwargs = json.loads(call)
    form: list[object] = [name]
    for shape, stride, dtype, on_device in tensors_in([args, list(kwargs.values())]):
        order = sorted(range(len(shape)), key=lambda dimension: (stride[dimension], shape[dimension]))
        widths = sorted(shape)[:-1] if ".mm." in name or ".addmm" in name or ".bmm." in name else []
        form.append([dtype, on_device, order, [dimension for dimension in order if not stride[dimension]], widths])
    return json.dumps(form)
