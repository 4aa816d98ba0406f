"""The comparison of predictions with measurements as a page of Markdown."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from autotune.core.status import ProbeStatus
from autotune.core.step_time import TIME_ERROR
from autotune.units import GIB, plural
from benchmarks.gpu.accuracy import Outcome, Pair, Spread, groups, pairs, rank_correlation, spread, verdict
from benchmarks.gpu.trace_pool import NO_TIME

KINDS: Mapping[str, str] = {
    "traced": "a trace of this very configuration at its shape, with all layers: the virtual device's own error",
    "planned": "`Evaluator.estimate`, from traces of few layers at its own sizes: the error of extrapolation is added",
    "measured operators": "the same, with the times of operators that were measured on the device, each by itself",
}
"""The kinds of prediction, each with its meaning."""

_PLANNED_KINDS = ("planned", "measured operators")
_MEMORY = ("allocated", "reserved")
# Of the other kind, memory is as planned.
_MEMORY_KINDS = ("traced", "planned")
_SHORT_SECONDS = 20e-6
_FEWEST = 3
_RANKED = 5


def page(
    title: str,
    about: Sequence[str],
    outcomes: Sequence[Outcome],
    operators: Mapping[str, Mapping[str, float]] | None = None,
    *,
    timed: bool = True,
) -> str:
    """Return the page.

    Args:
        about: sentences on how it was measured.
        outcomes: of all cases, those that were not run included.
        operators: by call, the ``predicted`` and the measured ``seconds`` of operators; None: none were measured.
        timed: whether measured times mean something; if not, they are left out.
    """
    times = [_times(outcomes), *([_operators(operators)] if operators else [])] if timed else []
    sections = [_all(outcomes), _fits(outcomes), *_by_group(outcomes), *times, _cases(outcomes, timed)]
    lines = [f"# {title}", "", *about, _count(outcomes), "", *(f"- **{kind}**: {what}" for kind, what in KINDS.items())]
    return "\n".join([*lines, *(line for section in sections for line in ("", *section))]) + "\n"


def summary(devices: Mapping[str, Sequence[Sequence[Outcome]]]) -> str:
    """Return how far plans were off in reserved memory and in time, either way, for the documentation.

    Args:
        devices: the outcomes on each machine, by its GPU; on each, at least one case was traced whole and planned.
    """
    reserved, times = (pairs(_together(devices), _PLANNED_KINDS[0], figure) for figure in ("reserved", "step time"))
    margin = min(pair.margin for pair in reserved)
    beyond = sum(abs(pair.error) > pair.margin for pair in reserved)
    within = [_within(machine) for machines in devices.values() for machine in machines]
    near, worst = sum(count for count, _ in within), min(within, key=lambda one: one[0] / one[1])
    off = f"{beyond} of {len(reserved)} {'is' if beyond == 1 else 'are'} off by more than the stated {margin:.0%}"
    return (
        f"In {len(reserved)} plans compared with probes on an {' and an '.join(devices)}, reserved memory is between "
        f"{_range(reserved, 'low', 'high')}, half within {_known(spread(reserved)).median:.1%}; {off}. Step times are "
        f"between {_range(times, 'short', 'long')}, half within {_known(spread(times)).median:.1%}; {near} of "
        f"{len(times)} are within the stated {TIME_ERROR:.0%}, on the worst of {len(within)} machines {worst[0]} of "
        f"{worst[1]}. The CPU's share of these times was fitted on the same machines."
    )


def brief(devices: Mapping[str, Sequence[Sequence[Outcome]]]) -> str:
    """Return how many plans were within their stated errors of reserved memory and of time, for the README.

    Args:
        devices: as for :func:`summary`.
    """
    reserved = pairs(_together(devices), _PLANNED_KINDS[0], "reserved")
    held = sum(abs(pair.error) <= pair.margin for pair in reserved)
    within = [_within(machine) for machines in devices.values() for machine in machines]
    near, timed = (sum(counts) for counts in zip(*within, strict=True))
    worst = min(within, key=lambda one: one[0] / one[1])
    margin = min(pair.margin for pair in reserved)
    return (
        f"Compared with probes on an {' and an '.join(devices)}, reserved memory is within the stated {margin:.0%} in "
        f"{held} of {len(reserved)} plans, and step time within the stated {TIME_ERROR:.0%} in {near} of {timed} "
        f"({worst[0]} of {worst[1]} on the worst of {len(within)} machines; the CPU's share of these times was fitted "
        "on the same machines)."
    )


def _within(outcomes: Sequence[Outcome]) -> tuple[int, int]:
    """Return how many planned times are within the stated error, and of how many."""
    times = pairs(outcomes, _PLANNED_KINDS[0], "step time")
    return sum(abs(pair.error) <= TIME_ERROR for pair in times), len(times)


def details(devices: Mapping[str, Sequence[Sequence[Outcome]]]) -> str:
    """Return what else the comparisons came to: allocated memory, traces of all layers, measured operators.

    Args:
        devices: as for :func:`summary`; on a machine, some workload has enough configurations to be ranked.
    """
    outcomes = _together(devices)
    planned, traced, reserved = (
        pairs(outcomes, kind, figure)
        for kind, figure in (("planned", "allocated"), ("traced", "allocated"), ("traced", "reserved"))
    )
    # The two kinds are compared on the rows that have both.
    both = [outcome for outcome in outcomes if all(pairs([outcome], kind, "step time") for kind in _PLANNED_KINDS)]
    plain, measured = (_known(spread(pairs(both, kind, "step time"))).median for kind in _PLANNED_KINDS)
    alike = [found for machines in devices.values() for machine in machines for found in _alike(machine)]
    rho = min(rank_correlation(found, _PLANNED_KINDS[0]) or 0.0 for found in alike)
    reached = min(_reached(found) for found in alike)
    figures = (
        ("allocated memory, planned", planned),
        ("allocated memory, traced with all layers", traced),
        ("reserved memory, traced with all layers", reserved),
    )
    rows = (
        f"| {name} | {len(found)} | {_range(found, 'low', 'high')} | {_share(_known(spread(found)).median)} |\n"
        for name, found in figures
    )
    return (
        f"| figure | cases | errors between | half within |\n|---|---|---|---|\n{''.join(rows)}\n"
        f"In each of {len(alike)} groups of at least {_RANKED} configurations with the same model and rows, the rank "
        f"correlation of planned and measured speeds is at least {rho:.2f}, and the configuration planned as the "
        f"fastest has at least {reached:.0%} of the highest measured speed. For {len(both)}, operators were also timed "
        f"one by one: step times computed from these are {measured:.1%} off in the median, planned ones {plain:.1%}."
    )


def _alike(machine: Sequence[Outcome]) -> list[list[Outcome]]:
    """Return the outcomes with predicted speeds of each workload that has enough of them: those that a user ranks."""
    found: dict[str, list[Outcome]] = {}
    for outcome in machine:
        if pairs([outcome], _PLANNED_KINDS[0], "tokens per second"):
            found.setdefault(outcome.scenario, []).append(outcome)
    return [outcomes for outcomes in found.values() if len(outcomes) >= _RANKED]


def _reached(outcomes: Sequence[Outcome]) -> float:
    """Return the measured speed of the one that was planned to be the fastest, by that of the fastest."""
    rates = pairs(outcomes, _PLANNED_KINDS[0], "tokens per second")
    return max(rates, key=lambda pair: pair.predicted).measured / max(pair.measured for pair in rates)


def _together(devices: Mapping[str, Sequence[Sequence[Outcome]]]) -> list[Outcome]:
    return [outcome for machines in devices.values() for machine in machines for outcome in machine]


def _range(found: Sequence[Pair], less: str, more: str) -> str:
    """Return the errors furthest off each way, such as ``12.2% too low and 12.8% too high``."""
    errors = [pair.error for pair in found]
    return f"{max(0.0, -min(errors)):.1%} too {less} and {max(0.0, *errors):.1%} too {more}"


def null_summary(device: str, real: Sequence[Outcome], null: Sequence[Outcome]) -> str:
    """Return the differences between a null GPU and a GPU in the cases that both finished, for the documentation."""
    beside = {outcome.name: outcome.measured for outcome in null if outcome.measured is not None}
    both = [
        (beside[outcome.name], outcome.measured)
        for outcome in real
        if outcome.measured is not None and outcome.measured.ok and outcome.name in beside and beside[outcome.name].ok
    ]
    allocated = [Pair(float(own.peak_bytes or 0), float(found.peak_bytes or 0), 0.0).error for own, found in both]
    reserved = [
        Pair(float(own.reserved_bytes or 0), float(found.reserved_bytes or 0), 0.0).error for own, found in both
    ]
    worst = f"{max(allocated, key=abs):+.2%} and {max(reserved, key=abs):+.2%}"
    return (
        f"Of {len(both)} configurations that ran on a null GPU and on an {device}, {allocated.count(0.0)} had exactly "
        f"the same peak of allocated memory, and {reserved.count(0.0)} of reserved memory; the worst are {worst} off."
    )


def _known(found: Spread | None) -> Spread:
    assert found is not None
    return found


def _count(outcomes: Sequence[Outcome]) -> str:
    ended = [outcome.status for outcome in outcomes]
    counts = ", ".join(f"{ended.count(status)} {status.replace('_', ' ')}" for status in dict.fromkeys(ended))
    shapes = [outcome.same_shape("traced") for outcome in outcomes]
    return (
        f"{len(outcomes)} configurations: {counts}. Of the traces, {shapes.count(True)} had the very micro-batch that "
        f"was measured and {shapes.count(False)} had another."
    )


def _all(outcomes: Sequence[Outcome]) -> Iterator[str]:
    yield "## All"
    yield ""
    yield "The goal: a median of 1.5 %, a 95th percentile of 5 %, and no underestimate beyond the stated error."
    yield ""
    yield from _table(
        "prediction | figure | cases | median | 95th percentile | worst | underestimates beyond the stated error",
        (
            [kind, figure, *_spread(spread(pairs(outcomes, kind, figure)))]
            for kind in _MEMORY_KINDS
            for figure in _MEMORY
            if pairs(outcomes, kind, figure)
        ),
    )


def _fits(outcomes: Sequence[Outcome]) -> Iterator[str]:
    yield "## What fits"
    yield ""
    tight = [
        outcome
        for outcome in outcomes
        if outcome.status == ProbeStatus.OUT_OF_MEMORY.value
        or any(verdict(outcome, kind) not in ("right", None) for kind in _MEMORY_KINDS)
    ]
    yield "Those that ran out of memory, and those of which the contrary was predicted."
    yield ""
    yield from _table(
        "case | limit | measured | " + " | ".join(f"{kind}: needs | verdict" for kind in _MEMORY_KINDS),
        (
            [outcome.name, _gib(outcome.limit_bytes), outcome.status.replace("_", " ")]
            + [cell for kind in _MEMORY_KINDS for cell in (_needs(outcome, kind), verdict(outcome, kind) or "")]
            for outcome in tight
        ),
    )


def _by_group(outcomes: Sequence[Outcome]) -> Iterator[Iterator[str]]:
    for kind in _MEMORY_KINDS:
        if pairs(outcomes, kind, "allocated"):
            yield _groups(outcomes, kind)


def _groups(outcomes: Sequence[Outcome], kind: str) -> Iterator[str]:
    yield f"## By group: {kind}"
    yield ""
    yield f"Groups of at least {_FEWEST} cases: by model, and by what differs between cases."
    yield ""
    compared = [outcome for outcome in outcomes if pairs([outcome], kind, "allocated")]
    columns = ("median", "95th percentile", "worst", "beyond")
    yield from _table(
        "group | cases | " + " | ".join(f"{figure}: {column}" for figure in _MEMORY for column in columns),
        (
            [name, str(len(members))]
            + [cell for figure in _MEMORY for cell in _spread(spread(pairs(members, kind, figure)))[1:]]
            for name, members in groups(compared).items()
            if len(members) >= _FEWEST
        ),
    )


def _times(outcomes: Sequence[Outcome]) -> Iterator[str]:
    yield "## Time"
    yield ""
    yield "Rho is Spearman's, of the tokens per second."
    yield ""
    scenarios = dict.fromkeys(outcome.scenario for outcome in outcomes)
    members = {name: [one for one in outcomes if one.scenario == name] for name in scenarios}
    yield from _table(
        "what | " + " | ".join(f"{kind}: cases | step time: median error | rho" for kind in KINDS),
        (
            [name, *(cell for kind in KINDS for cell in _time(chosen, kind))]
            for name, chosen in {"all": list(outcomes), **members}.items()
        ),
    )


def _time(outcomes: Sequence[Outcome], kind: str) -> list[str]:
    found = spread(pairs(outcomes, kind, "step time"))
    rho = rank_correlation(outcomes, kind)
    return (
        ["0", "", ""]
        if found is None
        else [str(found.count), _share(found.median), "" if rho is None else f"{rho:.2f}"]
    )


def _operators(measured: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """Yield the ratios of measured and predicted times of operators that are predicted to take a while."""
    yield "## Operators"
    yield ""
    found: dict[str, list[float]] = {}
    for call, times in measured.items():
        if times["predicted"] >= _SHORT_SECONDS:
            found.setdefault(json.loads(call)[0], []).append(times["seconds"] / times["predicted"])
    ratios = [ratio for each in found.values() for ratio in each]
    yield f"{len(measured)} operators were measured, each by itself; {len(ratios)} of them are predicted to take 20"
    yield f"µs or more. Measured times are {median(ratios):.2f} of the predicted ones in the median:"
    yield ""
    yield from _table(
        "operator | calls | measured / predicted: least | median | most",
        (
            [f"`{name}`", str(len(each)), *(f"{of(each):.2f}" for of in (min, median, max))]
            for name, each in sorted(found.items(), key=lambda item: -len(item[1]))
        ),
    )


def _cases(outcomes: Sequence[Outcome], timed: bool) -> Iterator[str]:
    yield "## Every case"
    yield ""
    units = "GiB and seconds" if timed else "GiB"
    yield f"In {units}; in brackets the relative error of each prediction, in the order of the kinds above."
    yield ""
    columns = ["case", "status", "allocated", "reserved", "context", *(["step"] if timed else [])]
    reached = [outcome for outcome in outcomes if outcome.reasons.get("measured") != NO_TIME]
    yield from _table(" | ".join(columns), (_case(outcome)[: len(columns)] for outcome in reached))
    yield ""
    for outcome in reached:
        for about, reason in outcome.reasons.items():
            if reason != NO_TIME:
                yield f"- {outcome.name}: {about}: {reason}"
    left = Counter(about for outcome in outcomes for about, reason in outcome.reasons.items() if reason == NO_TIME)
    if left:
        counts = ", ".join(f"{count} were not {about}" for about, count in left.items())
        yield f"Of {plural(len(outcomes), 'case')}, {counts}: {NO_TIME}."


def _case(outcome: Outcome) -> list[str]:
    found = outcome.measured
    if found is None:
        return [outcome.name, outcome.status, *[""] * 4]
    first = next(iter(outcome.predictions.values()), None)
    context = _gib(outcome.context_bytes) + (f" [{_gib(first.context_bytes)}]" if first is not None else "")
    return [
        outcome.name,
        outcome.status.replace("_", " "),
        _gib(found.peak_bytes) + _errors(outcome, "allocated"),
        _gib(found.reserved_bytes) + _errors(outcome, "reserved"),
        context,
        ("" if found.step_seconds is None else f"{found.step_seconds:.3f}") + _errors(outcome, "step time"),
    ]


def _errors(outcome: Outcome, figure: str) -> str:
    kinds = _MEMORY_KINDS if figure in _MEMORY else KINDS
    errors = [f"{pair.error:+.1%}" for kind in kinds for pair in pairs([outcome], kind, figure)]
    return f" [{', '.join(errors)}]" if errors else ""


def _needs(outcome: Outcome, kind: str) -> str:
    predicted = outcome.predictions.get(kind)
    return "" if predicted is None else _gib(predicted.device_bytes)


def _spread(found: Spread | None) -> list[str]:
    if found is None:
        return ["0", "", "", "", ""]
    return [
        str(found.count),
        _share(found.median),
        _share(found.percentile_95),
        f"{found.worst:+.2%}",
        str(found.beyond_margin),
    ]


def _share(value: float) -> str:
    return f"{value:.2%}"


def _gib(size: int | None) -> str:
    return "" if size is None else f"{size / GIB:.2f}"


def _table(head: str, rows: Iterator[list[str]]) -> Iterator[str]:
    yield f"| {head} |"
    yield "|---" * (head.count("|") + 1) + "|"
    for row in rows:
        yield f"| {' | '.join(row)} |"
