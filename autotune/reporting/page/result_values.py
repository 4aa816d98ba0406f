"""The values of the page about what a search found."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from autotune.core.candidate import Candidate
from autotune.core.length_report import histogram as length_bins
from autotune.core.result import Choosable, Result, Trial
from autotune.core.status import ProbeStatus, RunStatus
from autotune.reporting.comparison import (
    comparison,
    costs,
    headline,
    said_confirmed,
    said_contribution,
    said_runs,
    said_steps,
)
from autotune.reporting.outlook import (
    next_command,
    said_interrupted,
    said_left_out,
    said_trials,
    said_unlockable,
    said_ways_out,
)
from autotune.reporting.page.values import (
    Contributed,
    Edited,
    Point,
    Predicted,
    Table,
    TableRow,
    Values,
    Words,
    command_again,
    front,
    histogram,
    short,
)
from autotune.reporting.phases import phase_rows
from autotune.reporting.steps import Step, said_untraced
from autotune.reporting.unfit import said_nothing_fits
from autotune.reporting.words import baseline_name, printable, said, said_bytes, said_rate, said_status
from autotune.units import format_bytes

RECOMMENDED = Words("recommended", "the recommendation", "peak memory", "Measured with", "Search again with")


def result_values(result: Result) -> Values:
    """Return what a report of a result shows."""
    chosen, baseline = result.recommended, result.baseline
    name = baseline_name(own=result.base is not None)
    named = _Names(baseline, name)
    model, dataset = result.workload.model.name, result.workload.dataset.name
    compared = (("recommended", RECOMMENDED.chosen, chosen), ("default", name, baseline))
    known = [(role, name, one) for role, name, one in compared if one is not None]
    offers = said_unlockable(result.unlockable) if chosen is not None else said_ways_out(result)
    return Values(
        words=replace(RECOMMENDED, beside=name),
        title=f"{result.trainer}: {short(model)} on {short(dataset)}",
        verdict=_verdict(result),
        good=chosen is not None,
        choices=named(chosen.candidate) if chosen is not None else "",
        remarks=tuple(_remarks(result)),
        command=next_command(result) if chosen is not None else None,
        steps=tuple(
            Step(role, name, one.timeline, _said_measured(one))
            for role, name, one in known
            if one.timeline is not None
            and one.timeline.moments
            and (role == "recommended" or one.timeline != (chosen and chosen.timeline))
        ),
        untraced=said_untraced(
            (name for _, name, one in known if one.timeline is None), predicted=result.settings.get("plan") is not False
        ),
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
                item.told_apart is not False,
            )
            for item in result.contributions
        ),
        edited=_edited(result),
        lengths=histogram(
            length_bins(result.workload.dataset.documents), chosen.max_length if chosen is not None else None
        ),
        memory=tuple(_predicted_memory(result.trials, named)),
        speed=tuple(_predicted_speed(result.trials, named)),
        table=_table(result, named),
        lists=(
            ("Notes", tuple(note for note in (said_steps(result), *result.notes) if note)),
            ("Not searched", said_left_out(result.left_out)),
            ("Not measured, since it changes training", offers if chosen is not None else ()),
            ("What might change this (not measured)", () if chosen is not None else offers),
        ),
        facts=tuple(_facts(result)),
        repeated=command_again("probe", result.settings),
    )


class _Names:
    """Names candidates by what differs from the baseline; in full where that was never measured."""

    def __init__(self, baseline: Choosable | None, name: str) -> None:
        self._name = name
        self._baseline = baseline.candidate if baseline is not None else None

    def __call__(self, candidate: Candidate) -> str:
        if self._baseline is None:
            return " ".join(f"{knob}={choice}" for knob, choice in candidate.items())
        return said(candidate, self._baseline, self._name)


def _verdict(result: Result) -> str:
    if result.recommended is not None:
        return headline(result, result.recommended)
    return said_interrupted(result) if result.status is RunStatus.INTERRUPTED else said_nothing_fits(result)


def _remarks(result: Result) -> Iterable[str]:
    if result.recommended is None:
        return
    yield said_confirmed(result)
    yield said_runs(result, result.recommended)


def _edited(result: Result) -> Edited | None:
    base = result.base
    if base is None or not (base.keys or base.diff):
        return None
    return Edited(base.file, costs(result), tuple(printable(base.diff).splitlines()))


def _points(result: Result) -> tuple[Point, ...]:
    """Return a point for every candidate that ran; the two compared ones with their compared figures."""
    named = _Names(result.baseline, baseline_name(own=result.base is not None))
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
        Point(named(candidate), f"trial {number}", peak, rate, role, best)
        for (candidate, role, number, peak, rate), best in zip(ran, on_front, strict=True)
    )


def _said_measured(one: Choosable) -> str:
    if one.reserved_bytes is not None:
        return f"Probes measured {format_bytes(one.reserved_bytes)} reserved, and the context beside it."
    if one.peak_bytes is not None:
        peak = format_bytes(one.peak_bytes)
        return f"Probes measured {peak}: on a CPU, memory that is never written to is not counted."
    return ""


def _table(result: Result, named: Callable[[Candidate], str]) -> Table:
    return Table(
        title="Trials",
        said=said_trials(result),
        number="trial",
        columns=("peak", "tok/s", "predicted"),
        last="candidate, and why it was not tried or ended",
        rows=tuple(
            TableRow(
                number=str(trial.number),
                name=named(trial.candidate),
                outcome=said_status(trial.status),
                cells=(
                    said_bytes(trial.peak_bytes),
                    said_rate(trial.tokens_per_second),
                    said_bytes(trial.predicted_bytes),
                ),
                reason=trial.reason or trial.illegal,
            )
            for trial in result.trials
        ),
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
    yield "device", f"{hardware.name}, {hardware.openmp}" if hardware.openmp else hardware.name
    yield from sorted(result.environment.items())
