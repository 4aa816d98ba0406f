"""A public table with the estimates of several estimators and a trace for each run, as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from autotune.planning.extrapolation.forecast import TRACED_ERROR
from benchmarks.published.render import head, listed
from benchmarks.published.tables import Outcome, Row, Table

_GB = 1e9
_OURS = "autotune"
_RIVALS = ("xMem", "DNNMem", "LLMem", "SchedTune")

Rows = Sequence[tuple[Row, Outcome]]


@dataclass(frozen=True)
class Said:
    """What an estimator said of a run.

    Attributes:
        bytes: what it needs.
        out_of_memory: whether it runs out of memory; None where nothing was said.
        seconds: that this took, or None.
    """

    bytes: float
    out_of_memory: bool | None
    seconds: float | None


def said(row: Row, outcome: Outcome) -> Mapping[str, Said]:
    """Return the estimate of each estimator for a run, ours first."""
    found = {
        name: Said(one["bytes"], one.get("out_of_memory"), one.get("seconds"))
        for name, one in row.settings["rivals"].items()
    }
    if outcome.failure:
        return found
    return {_OURS: Said(outcome.traced["reserved"], not outcome.traced["fits"], outcome.seconds), **found}


def stated(outcome: Outcome) -> tuple[float, float]:
    """Return the least and the most reserved bytes by a trace."""
    reserved = outcome.traced["reserved"]
    return reserved * (1 - TRACED_ERROR), reserved * (1 + TRACED_ERROR) + max(0, outcome.traced["varied"])


def rivals_rendered(table: Table, rows: Rows, versions: str) -> str:
    """Return the table with its errors, and how those of each estimator lie.

    Args:
        rows: what became of each.
        versions: of the software that was traced.
    """
    body = (*_statistics(rows), "", *_fragmentation(rows), "", *_body(rows), *listed("Remarks", table.explained))
    return "\n".join((*head(table, versions), *body))


def _ran(rows: Rows) -> list[tuple[Row, Outcome, float]]:
    return [(row, outcome, size) for row, outcome in rows if (size := row.published["reserved"]) is not None]


def _statistics(rows: Rows) -> Iterator[str]:
    """Yield a line for each estimator: errors of the runs that ran, and verdicts of all."""
    yield "| estimator | ran | median error | 95th perc. | worst | within 1 % | foretold | false alarms | median s |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|--:|"
    everything = [(row, said(row, outcome)) for row, outcome in rows]
    for name in (_OURS, *_RIVALS):
        known = [(row, words[name]) for row, words in everything if name in words]
        errors = [one.bytes / size - 1 for row, one in known if (size := row.published["reserved"]) is not None]
        if not errors:
            continue
        sizes = sorted(map(abs, errors))
        verdicts = [
            (row.published["reserved"] is None, one.out_of_memory)
            for row, one in known
            if one.out_of_memory is not None
        ]
        foretold = sum(ran_out and bool(told) for ran_out, told in verdicts)
        alarms = sum(bool(told) and not ran_out for ran_out, told in verdicts)
        seconds = [one.seconds for _, one in known if one.seconds is not None]
        yield (
            f"| {name} | {len(sizes)} | {median(sizes):.2%} | {_percentile(sizes):.2%} | {max(errors, key=abs):+.2%} "
            f"| {sum(size <= 0.01 for size in sizes) / len(sizes):.0%} "
            f"| {f'{foretold} of {sum(ran_out for ran_out, _ in verdicts)}' if verdicts else '—'} "
            f"| {alarms if verdicts else '—'} | {f'{median(seconds):.1f}' if seconds else '—'} |"
        )


def _percentile(sizes: Sequence[float]) -> float:
    return sizes[min(len(sizes) - 1, int(0.95 * len(sizes)))]


def _fragmentation(rows: Rows) -> Iterator[str]:
    """Yield how many runs are within the stated bounds, varied lengths included."""
    ran = [(outcome, size) for _, outcome, size in _ran(rows) if not outcome.failure]
    beyond = sorted(
        max(0.0, low / size - 1, 1 - high / size) for outcome, size in ran for low, high in [stated(outcome)]
    )
    inside = sum(not share for share in beyond)
    yield (
        f"Stated is the trace ±{TRACED_ERROR:.0%}, and above that what varied lengths may add (a column of its own): "
        f"{inside} of {len(beyond)} runs lie inside, the worst {beyond[-1]:.2%} outside. "
        "For the others, the table has their errors, or what they said of runs that ran out of memory."
    )
    shares = sorted(outcome.traced["varied"] / outcome.traced["reserved"] for outcome, _ in ran)
    enough = sum(outcome.traced["varied"] >= outcome.traced["random"] for outcome, _ in ran)
    short = max(
        (outcome.traced["random"] - outcome.traced["varied"]) / outcome.traced["reserved"] for outcome, _ in ran
    )
    yield (
        f"What varied lengths may add is {median(shares):.1%} of the trace in the median, at most {shares[-1]:.1%}. "
        f"In {enough} of {len(ran)} it is at least what 32 iterations of random lengths from 64 to 128 tokens add; "
        f"elsewhere, that is up to {max(0.0, short):.1%} of the trace more."
    )


def _body(rows: Rows) -> Iterator[str]:
    names = " | ".join(f"{name}" for name in _RIVALS)
    yield f"| run | measured | traced | error | varied lengths | inside | {names} | seconds: ours, xMem, DNNMem |"
    yield "|---|--:|--:|--:|--:|---|" + "--:|" * len(_RIVALS) + "--:|"
    for row, outcome in rows:
        measured, words = row.published["reserved"], said(row, outcome)
        rivals = " | ".join(_cell(measured, words.get(name)) for name in _RIVALS)
        shown = "out of memory" if measured is None else f"{measured / _GB:.2f} GB"
        yield f"| {row.name} | {shown} | {_ours(row, outcome)} | {rivals} | {_seconds(words)} |"


def _ours(row: Row, outcome: Outcome) -> str:
    if outcome.failure:
        return f"not traced: {outcome.failure} | — | — | —".replace("||", "/")
    measured, traced = row.published["reserved"], outcome.traced
    verdict = "" if traced["fits"] else ", out of memory"
    low, high = stated(outcome)
    inside = "" if measured is None else "yes" if low <= measured <= high else "no"
    error = "" if measured is None else f"{traced['reserved'] / measured - 1:+.2%}"
    return f"{traced['reserved'] / _GB:.2f} GB{verdict} | {error} | +{max(0, traced['varied']) / _GB:.2f} GB | {inside}"


def _cell(measured: float | None, one: Said | None) -> str:
    if one is None:
        return "—"
    verdict = ", out of memory" if one.out_of_memory else ""
    if measured is None:
        return f"{one.bytes / _GB:.2f} GB{verdict}"
    return f"{one.bytes / measured - 1:+.1%}{verdict}"


def _seconds(words: Mapping[str, Said]) -> str:
    known = [words.get(name) for name in (_OURS, "xMem", "DNNMem")]
    return ", ".join("—" if one is None or one.seconds is None else f"{one.seconds:.1f}" for one in known)
