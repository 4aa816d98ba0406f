"""Evaluates repeated runs of the winner and the baseline: rates, the speed-up, and candidates not distinguished."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from autotune.core.measurement import Measurement
from autotune.core.spread import Interval, mean_of, mean_rate, next_run
from autotune.reporting.words import baseline_name, differences
from autotune.study.comparison import next_turn, pairs, runs_after, runs_beside
from autotune.study.problem import Record, SearchOutcome
from autotune.units import counted, format_bytes

_SCATTERED = 3.0
"""Ratio of both ends of the range of a further run from which on runs tell little."""


@dataclass(frozen=True)
class SpeedUp:
    """The winner's token rate over the baseline's.

    Attributes:
        interval: 95 % confidence interval of the mean, None for fewer than two pairs.
        pairs: number of pairs of alternating runs; 0: the ratio is that of their probes.
    """

    ratio: float
    interval: Interval | None
    pairs: int


def rates_of(record: Record, winner: Record | None) -> tuple[float, ...]:
    """Return the token rates from which a record's promised rate is computed.

    They are those of its longer run and its short ones: both time steps in the same way, and if whole steps were slower
    than the steps that short runs compose, the spread would show it. The probe is excluded if there are other runs,
    since the winner was selected for a high rate in its probe. For the baseline, they are those of its alternating runs
    with the winner, without a longer run of its own, so that the two are comparable.
    """
    alternating = runs_beside(winner) if winner is not None and winner.number != record.number else ()
    rates = tuple(run.tokens_per_second for run in alternating if run.ok and run.tokens_per_second)
    return rates or record.rates or tuple(rate for rate in (record.measurement.tokens_per_second,) if rate)


def speed_up(winner: Record | None, baseline: Record | None) -> SpeedUp | None:
    """Return the speed-up, or None if either did not run; without pairs it is the ratio of the two probes."""
    if winner is None or baseline is None:
        return None
    if winner.number == baseline.number:
        return SpeedUp(1.0, None, 0)
    found = [ratio for ratio in (_ratio(ours, theirs) for ours, theirs in pairs(winner)) if ratio is not None]
    if found:
        return SpeedUp(mean_rate(found), mean_of(found), len(found))
    probes = _ratio(winner.measurement, baseline.measurement)
    return SpeedUp(probes, None, 0) if probes is not None else None


def failure_of(record: Record, records: Iterable[Record]) -> Measurement | None:
    """Return the first run after a record's probe that did not end ``ok``, in turn with any winner; None without."""
    return next((run for run in runs_after(record, records) if not run.ok), None)


def notes_on_runs(outcome: SearchOutcome, *, own: bool = False) -> tuple[str, ...]:
    """Return notes on runs after the probes that failed, were too few, or do not distinguish candidates, in sentences.

    Args:
        own: whether the baseline is the user's own configuration.
    """
    return (*_failed(outcome, own=own), *_unfinished(outcome), *_scattered(outcome), *_not_told_apart(outcome))


def _ratio(ours: Measurement, theirs: Measurement) -> float | None:
    if not ours.tokens_per_second or not theirs.tokens_per_second:
        return None
    return ours.tokens_per_second / theirs.tokens_per_second


def _failed(outcome: SearchOutcome, *, own: bool) -> Iterator[str]:
    """Yield a note for each candidate that a run after its probe showed not to fit, or not to run."""
    baseline = outcome.baseline
    for record in outcome.failed_confirmations:
        of_baseline = baseline is not None and record.number == baseline.number
        name = baseline_name(own=own, starts=True) if of_baseline else f"Trial {record.number}"
        failure = failure_of(record, outcome.records)
        assert failure is not None
        yield f"{name} ran in its probe and not in a later run ({failure.status.value}, {failure.reason})."


def _unfinished(outcome: SearchOutcome) -> tuple[str, ...]:
    winner, baseline = outcome.winner, outcome.baseline
    if winner is None or next_turn(winner, baseline, outcome.comparisons) is None:
        return ()
    speed = speed_up(winner, baseline)
    ours = sum(run.number == winner.number for run in winner.comparison)
    sentence = f"The search ended after {ours} of {outcome.comparisons} short runs of the recommendation."
    if speed is not None and speed.pairs == 0:
        sentence += " The speed-up is the ratio of one probe of each."
    return (sentence,)


def _scattered(outcome: SearchOutcome) -> tuple[str, ...]:
    """Return a note where a further run of the winner may be several times as fast as another."""
    expected = next_run(outcome.winner.rates) if outcome.winner is not None else None
    if expected is None or expected.high <= _SCATTERED * expected.low:
        return ()
    return ("Speeds differ much from run to run, as on a machine that others use, too. Search again on an idle one.",)


def equally_fast(outcome: SearchOutcome) -> tuple[Record, ...]:
    """Return the other candidates that are at least as fast, mostly in one probe, as a further run of the winner.

    Without several runs of the winner there is no such range, and none is returned. The winner's own probe is not used:
    the winner was selected for its high rate. The baseline is none of them: its runs in turn with the winner's tell
    more than one probe does.
    """
    winner, baseline = outcome.winner, outcome.baseline
    expected = next_run(winner.rates) if winner is not None else None
    if winner is None or expected is None:
        return ()
    return tuple(
        record
        for record in outcome.records
        if record.number != winner.number
        and (baseline is None or record.number != baseline.number)
        and record.measurement.ok
        and record.failure is None
        and record.tokens_per_second >= expected.low
    )


def _not_told_apart(outcome: SearchOutcome) -> tuple[str, ...]:
    """Return a note on candidates that are as fast as the winner, and the one that needs the least memory."""
    winner, baseline, others = outcome.winner, outcome.baseline, equally_fast(outcome)
    if winner is None or baseline is None or not others:
        return ()
    count = counted(len(others), "other candidate")
    sentence = f"In speed, {count} cannot be told apart from the recommendation by one probe"
    lightest = min(others, key=lambda record: record.measurement.need_bytes or 0)
    least = lightest.measurement.need_bytes or 0
    ours = max(run.need_bytes or 0 for run in (winner.measurement, *winner.runs))
    if least >= ours:
        return (f"{sentence}; none of them needs less memory.",)
    which = f"trial {lightest.number} ({differences(lightest.candidate, baseline.candidate)})"
    return (f"{sentence}; {which} needs the least memory, {format_bytes(least)} instead of {format_bytes(ours)}.",)
