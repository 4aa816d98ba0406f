"""What a report shows, as values: computed once from a result, the same for HTML and Markdown."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from autotune.core.candidate import Candidate
from autotune.core.lengths import LengthDistribution
from autotune.core.result import Choosable, Result, Trial
from autotune.core.status import ProbeStatus, RunStatus
from autotune.report.comparison import Row, comparison, headline, said_contribution, said_runs, said_steps
from autotune.report.outlook import (
    next_command,
    said_interrupted,
    said_left_out,
    said_nothing_fits,
    said_trials,
    said_unlockable,
    said_ways_out,
)
from autotune.report.phases import PhaseRow, phase_rows
from autotune.report.words import said, said_status

BINS = 40
"""Bars of the histogram of lengths."""


@dataclass(frozen=True)
class Point:
    """A candidate that ran to the end.

    Attributes:
        role: ``recommended``, ``default`` or ``other``.
        on_front: whether no other one is at least as fast and needs less memory.
    """

    name: str
    number: int
    peak_bytes: int
    tokens_per_second: float
    role: str
    on_front: bool


@dataclass(frozen=True)
class Contributed:
    """What one choice of the recommendation contributed, in words, and as factors where they were measured."""

    choice: str
    instead_of: str
    measured: str
    speedup: float | None
    peak_bytes_saved: int | None


@dataclass(frozen=True)
class Predicted:
    """A figure of a probe as it was predicted before it ran, and as it was measured."""

    name: str
    predicted: float
    measured: float


@dataclass(frozen=True)
class TrialRow:
    """A candidate that the search looked at, for the table."""

    number: int
    name: str
    status: str
    peak_bytes: int | None
    tokens_per_second: float | None
    predicted_bytes: int | None
    reason: str


@dataclass(frozen=True)
class Histogram:
    """How many rows of the dataset are about so long.

    Attributes:
        edges: in tokens; one more than there are bars.
        rows: in each bar.
        cut: the length at which the recommendation cuts or drops rows; None where it does not.
    """

    edges: tuple[int, ...]
    rows: tuple[int, ...]
    cut: int | None
    longest: int


@dataclass(frozen=True)
class Values:
    """Everything that a report shows, from top to bottom.

    Attributes:
        title: of the page.
        verdict: the result in a sentence.
        good: whether something was found.
        choices: of the recommendation, where they differ from TRL's default.
        remarks: what is to be known of the verdict, in sentences.
        figures: the recommendation beside TRL's default.
        phases: memory and time of the phases of the recommendation; empty where the phases were not told apart.
        budget_bytes: what a candidate may need.
        facts: about the run, by name.
        left_out, offers: choices that were not searched and why, and what else might help, in sentences.
        command: that trains as recommended, or None.
        repeated: the command that searches again.
    """

    title: str
    verdict: str
    good: bool
    choices: str
    remarks: tuple[str, ...]
    figures: tuple[Row, ...]
    phases: tuple[PhaseRow, ...]
    points: tuple[Point, ...]
    budget_bytes: int
    contributions: tuple[Contributed, ...]
    lengths: Histogram
    memory: tuple[Predicted, ...]
    speed: tuple[Predicted, ...]
    trials: tuple[TrialRow, ...]
    trial_counts: str
    notes: tuple[str, ...]
    left_out: tuple[str, ...]
    offers: tuple[str, ...]
    facts: tuple[tuple[str, str], ...]
    command: str | None
    repeated: str


def values(result: Result) -> Values:
    """Return what a report of a result shows."""
    chosen, baseline = result.recommended, result.baseline
    named = _Names(baseline)
    model, dataset = result.workload.model.name, result.workload.dataset.name
    return Values(
        title=f"{result.trainer}: {_short(model)} on {_short(dataset)}",
        verdict=_verdict(result),
        good=chosen is not None,
        choices=named(chosen.candidate) if chosen is not None else "",
        remarks=tuple(_remarks(result)),
        figures=comparison(result, chosen) if chosen is not None else (),
        phases=phase_rows(chosen) if chosen is not None else (),
        points=_points(result),
        budget_bytes=result.budget_bytes,
        contributions=tuple(
            Contributed(
                f"{item.knob}={item.choice}",
                str(item.instead_of),
                said_contribution(item),
                item.speedup,
                item.peak_bytes_saved,
            )
            for item in result.contributions
        ),
        lengths=histogram(result.workload.dataset.lengths, chosen.max_length if chosen is not None else None),
        memory=tuple(_predicted_memory(result.trials, named)),
        speed=tuple(_predicted_speed(result.trials, named)),
        trials=tuple(
            TrialRow(
                trial.number,
                named(trial.candidate),
                said_status(trial.status),
                trial.peak_bytes,
                trial.tokens_per_second,
                trial.predicted_bytes,
                trial.reason,
            )
            for trial in result.trials
        ),
        trial_counts=said_trials(result),
        notes=tuple(note for note in (said_steps(result), *result.notes) if note),
        left_out=said_left_out(result.left_out),
        offers=said_unlockable(result.unlockable) if chosen is not None else said_ways_out(result),
        facts=tuple(_facts(result)),
        command=next_command(result) if chosen is not None else None,
        repeated=_repeated(result),
    )


def histogram(lengths: LengthDistribution, cut: int | None) -> Histogram:
    """Return the histogram of row lengths; the last bar ends with the longest row."""
    longest = lengths.longest
    width = max(1, -(-longest // BINS))
    edges = tuple(range(0, longest + width, width))
    rows = [0] * (len(edges) - 1)
    for length, count in lengths.counts.items():
        rows[min(len(rows) - 1, max(0, length - 1) // width)] += count
    return Histogram(edges, tuple(rows), cut if cut is not None and cut < longest else None, longest)


def front(sizes: Sequence[tuple[int, float]]) -> tuple[bool, ...]:
    """Return which pairs of peak and rate lie on the Pareto front: nothing needs less memory and is as fast."""
    order = sorted(range(len(sizes)), key=lambda place: (sizes[place][0], -sizes[place][1]))
    best = [0.0, *accumulate((sizes[place][1] for place in order), max)]
    on_front = {place for place, before in zip(order, best, strict=False) if sizes[place][1] > before}
    return tuple(place in on_front for place in range(len(sizes)))


class _Names:
    """Names candidates by what differs from TRL's default; in full where that was never measured."""

    def __init__(self, baseline: Choosable | None) -> None:
        self._baseline = baseline.candidate if baseline is not None else None

    def __call__(self, candidate: Candidate) -> str:
        if self._baseline is None:
            return " ".join(f"{knob}={choice}" for knob, choice in candidate.items())
        return said(candidate, self._baseline)


def _verdict(result: Result) -> str:
    if result.recommended is not None:
        return headline(result, result.recommended)
    return said_interrupted(result) if result.status is RunStatus.INTERRUPTED else said_nothing_fits(result)


def _remarks(result: Result) -> Iterable[str]:
    if result.recommended is None:
        return
    confirmed = "Confirmed by a longer run, the worst batch included."
    yield confirmed if result.confirmed else "Not confirmed by a longer run."
    yield said_runs(result, result.recommended)


def _points(result: Result) -> tuple[Point, ...]:
    """Return a point for every candidate that ran; the two compared ones with their compared figures."""
    named = _Names(result.baseline)
    found: dict[Candidate, tuple[str, int, int | None, float | None]] = {
        trial.candidate: ("other", trial.number, trial.peak_bytes, trial.tokens_per_second)
        for trial in result.trials
        if trial.status is ProbeStatus.OK
    }
    for role, one in (("default", result.baseline), ("recommended", result.recommended)):
        if one is not None:
            found[one.candidate] = (role, one.number, one.peak_bytes, one.tokens_per_second)
    ran = [
        (candidate, role, number, peak, rate)
        for candidate, (role, number, peak, rate) in found.items()
        if peak is not None and rate is not None
    ]
    on_front = front([(peak, rate) for _, _, _, peak, rate in ran])
    return tuple(
        Point(named(candidate), number, peak, rate, role, best)
        for (candidate, role, number, peak, rate), best in zip(ran, on_front, strict=True)
    )


def _predicted_memory(trials: Iterable[Trial], named: _Names) -> Iterable[Predicted]:
    for trial in trials:
        if trial.status is ProbeStatus.OK and trial.predicted_bytes is not None:
            measured = trial.reserved_bytes if trial.reserved_bytes is not None else trial.peak_bytes
            if measured is not None:
                yield Predicted(named(trial.candidate), trial.predicted_bytes, measured)


def _predicted_speed(trials: Iterable[Trial], named: _Names) -> Iterable[Predicted]:
    for trial in trials:
        if trial.status is ProbeStatus.OK and trial.predicted_tokens_per_second and trial.tokens_per_second:
            yield Predicted(named(trial.candidate), trial.predicted_tokens_per_second, trial.tokens_per_second)


def _facts(result: Result) -> Iterable[tuple[str, str]]:
    model, dataset, hardware = result.workload.model, result.workload.dataset, result.hardware
    yield "model", f"{model.name} ({model.architecture}, {model.parameters:,} parameters)"
    yield "dataset", f"{dataset.name} ({dataset.lengths.rows:,} rows, {dataset.lengths.tokens:,} tokens)"
    yield "device", hardware.name
    yield from sorted(result.environment.items())


def _repeated(result: Result) -> str:
    """Return the command that searches again, from the options that were given."""
    given = dict(result.settings)
    words = ["autotune", "probe", str(given.pop("model", result.workload.model.name))]
    words.append(str(given.pop("dataset", result.workload.dataset.name)))
    for name, value in given.items():
        option = f"--{name.replace('_', '-')}"
        match value:
            case bool():
                words += [] if value else [f"--no-{option[2:]}"]
            case Mapping():
                words += [word for knob, choice in value.items() for word in (option, f"{knob}={choice}")]
            case list() | tuple():
                words += [option, ",".join(map(str, value))]
            case _:
                words += [option, str(value)]
    return shlex.join(words)


def _short(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2] or name
