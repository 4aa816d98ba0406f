"""The errors of predictions against measurements: memory, time, verdicts on what fits, and the order of speeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import correlation, median

from autotune.core.candidate import Choice
from autotune.core.measurement import Measurement
from autotune.core.status import ProbeStatus


@dataclass(frozen=True)
class Prediction:
    """What was predicted of a case, in the words of :class:`autotune.core.documents.estimate.MemoryEstimate`.

    Attributes:
        error: share of the memory that the prediction says it may be off by.
        fits: whether it is predicted to stay within the case's limit.
        rows, tokens: of the micro-batch that was traced, or None where it follows from others.
        trace_seconds: what its trace took, or None likewise.
    """

    allocated_bytes: int
    reserved_bytes: int | None
    context_bytes: int
    host_bytes: int
    error: float
    fits: bool
    step_seconds: float | None
    tokens_per_second: float | None
    rows: int | None = None
    tokens: int | None = None
    trace_seconds: float | None = None

    @property
    def device_bytes(self) -> int:
        """Needed device memory, context included."""
        return (self.allocated_bytes if self.reserved_bytes is None else self.reserved_bytes) + self.context_bytes


@dataclass(frozen=True)
class Outcome:
    """A case with what was measured and what was predicted, as far as both got.

    Attributes:
        limit_bytes: memory that it may use on the device; None: not known yet.
        choices: of all techniques; empty: not known yet.
        measured: None where it never ran.
        predictions: by kind.
        reasons: by ``measured`` or a kind of prediction, why there is none.
        flat: whether rows lie end to end in a micro-batch.
        trainer: name of the trainer.
    """

    name: str
    scenario: str
    model: str
    limit_bytes: int | None = None
    choices: Mapping[str, Choice] = field(default_factory=dict)
    measured: Measurement | None = None
    predictions: Mapping[str, Prediction] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    flat: bool = False
    trainer: str = "sft"

    @property
    def status(self) -> str:
        """How it ended, in a word."""
        return "not run" if self.measured is None else self.measured.status.value

    @property
    def context_bytes(self) -> int | None:
        """The process's memory outside its allocator, by the driver; None if the driver does not report it."""
        found = self.measured
        if found is None or found.device_bytes is None or found.reserved_bytes is None:
            return None
        return found.device_bytes - found.reserved_bytes

    def same_shape(self, kind: str) -> bool | None:
        """Whether a trace had the very micro-batch that was measured; None where either is not known.

        Rows that lie end to end are one to the trace and several to the measurement: their tokens say all.
        """
        found, predicted = self.measured, self.predictions.get(kind)
        if found is None or found.worst_tokens is None or predicted is None or predicted.tokens is None:
            return None
        return found.worst_tokens == predicted.tokens and (self.flat or found.worst_rows == predicted.rows)


@dataclass(frozen=True)
class Pair:
    """A figure as predicted and as measured.

    Attributes:
        margin: share by which the prediction says that it may be off; infinite where it does not say.
    """

    predicted: float
    measured: float
    margin: float

    @property
    def error(self) -> float:
        """Relative error: negative where too little was predicted."""
        return self.predicted / self.measured - 1

    @property
    def beyond_margin(self) -> bool:
        """Whether more was measured than the prediction allows for."""
        return self.measured > self.predicted * (1 + self.margin)


@dataclass(frozen=True)
class Spread:
    """Errors of several cases.

    Attributes:
        median, percentile_95: of their size.
        worst: the largest, with its sign.
        beyond_margin: underestimates beyond the margin.
    """

    count: int
    median: float
    percentile_95: float
    worst: float
    beyond_margin: int


def spread(pairs: Sequence[Pair]) -> Spread | None:
    """Return a summary of the errors of pairs; None without pairs."""
    if not pairs:
        return None
    errors = [pair.error for pair in pairs]
    sizes = sorted(map(abs, errors))
    # The nearest rank: the smallest that 95 % of the cases do not exceed.
    percentile = sizes[math.ceil(0.95 * len(sizes)) - 1]
    return Spread(
        len(pairs), median(sizes), percentile, max(errors, key=abs), sum(pair.beyond_margin for pair in pairs)
    )


def _allocated(predicted: Prediction, measured: Measurement) -> Pair | None:
    return _pair(predicted.allocated_bytes, measured.peak_bytes, predicted.error)


def _reserved(predicted: Prediction, measured: Measurement) -> Pair | None:
    return _pair(predicted.reserved_bytes, measured.reserved_bytes, predicted.error)


def _step_time(predicted: Prediction, measured: Measurement) -> Pair | None:
    return _pair(predicted.step_seconds, measured.step_seconds)


def _rate(predicted: Prediction, measured: Measurement) -> Pair | None:
    return _pair(predicted.tokens_per_second, measured.tokens_per_second)


def _pair(predicted: float | None, measured: float | None, margin: float = math.inf) -> Pair | None:
    return None if predicted is None or measured is None else Pair(predicted, measured, margin)


FIGURES: Mapping[str, Callable[[Prediction, Measurement], Pair | None]] = {
    "allocated": _allocated,
    "reserved": _reserved,
    "step time": _step_time,
    "tokens per second": _rate,
}
"""By name, what is both predicted and measured."""


def pairs(outcomes: Iterable[Outcome], kind: str, figure: str) -> list[Pair]:
    """Return the pairs of a figure, of cases that ran to the end and have a prediction of a kind."""
    found = (
        FIGURES[figure](outcome.predictions[kind], outcome.measured)
        for outcome in outcomes
        if outcome.measured is not None and outcome.measured.ok and kind in outcome.predictions
    )
    return [pair for pair in found if pair is not None]


def groups(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """Return outcomes by model, by trainer, and by each choice of a knob for which they have several."""
    found: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.model, []).append(outcome)
    trainers = dict.fromkeys(outcome.trainer for outcome in outcomes)
    for trainer in trainers if len(trainers) > 1 else ():
        found[f"trainer {trainer}"] = [outcome for outcome in outcomes if outcome.trainer == trainer]
    for knob in dict.fromkeys(knob for outcome in outcomes for knob in outcome.choices):
        having = [outcome for outcome in outcomes if knob in outcome.choices]
        choices = {outcome.choices[knob] for outcome in having}
        for choice in sorted(choices, key=lambda one: (isinstance(one, str), one)) if len(choices) > 1 else ():
            found[f"{knob}={choice}"] = [outcome for outcome in having if outcome.choices[knob] == choice]
    return found


def verdict(outcome: Outcome, kind: str) -> str | None:
    """Return whether the prediction that a case fits was right, in words; None if a side is missing."""
    predicted, found = outcome.predictions.get(kind), outcome.measured
    ended = (ProbeStatus.OK, ProbeStatus.OUT_OF_MEMORY)
    if predicted is None or found is None or outcome.limit_bytes is None or found.status not in ended:
        return None
    if predicted.fits == found.ok:
        return "right"
    if found.ok:
        # A search passes over what is over the limit by more than the error.
        vetoed = predicted.device_bytes > outcome.limit_bytes * (1 + predicted.error)
        return "wrong: it would have been vetoed" if vetoed else "wrong, within its error"
    surprised = predicted.device_bytes * (1 + predicted.error) < outcome.limit_bytes
    return "wrong: an underestimate beyond its error" if surprised else "wrong, within its error"


def rank_correlation(outcomes: Iterable[Outcome], kind: str) -> float | None:
    """Return Spearman's rho of predicted and measured tokens per second; None where it is not defined."""
    rates = pairs(outcomes, kind, "tokens per second")
    return spearman([pair.predicted for pair in rates], [pair.measured for pair in rates])


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return the correlation of ranks; None for fewer than three pairs, or where all of one side are equal."""
    if len(first) < 3 or len(set(first)) == 1 or len(set(second)) == 1:
        return None
    return correlation(_ranks(first), _ranks(second))


def _ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value; equal values share the mean of theirs."""
    ascending = sorted(values)
    return [ascending.index(value) + (ascending.count(value) - 1) / 2 for value in values]
