"""Compares the recommendation with the baseline, as values."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from autotune.core.result import Choosable, Contribution, Result
from autotune.core.status import ProbeStatus, RunStatus
from autotune.reporting.document import Bar, Cell
from autotune.reporting.words import (
    MISSING,
    baseline_name,
    bytes_or_dash,
    number_or_dash,
    printable,
    rate_or_dash,
    share_text,
    status_text,
)
from autotune.trainers import find_trainer
from autotune.units import format_bytes, format_duration


class Speeds(StrEnum):
    """Result of comparing the recommendation's speed with the baseline's.

    Attributes:
        OWN: the baseline itself is recommended.
        UNKNOWN: one of the two was not measured.
        EQUAL: both show the same to two digits, and nothing shows the spread between runs.
        NOT_TOLD_APART: either may be the faster one: the interval of the ratio includes 1, or, without an interval, the
            range of a further run of the recommendation includes the baseline's rate.
        FASTER, SLOWER: the recommendation is; slower than a baseline that may not be recommended.
    """

    OWN = "own"
    UNKNOWN = "unknown"
    EQUAL = "equal"
    NOT_TOLD_APART = "not told apart"
    FASTER = "faster"
    SLOWER = "slower"


def compared(result: Result, recommended: Choosable) -> Speeds:
    """Return how the recommendation of a result compares with its baseline."""
    speedup, low, high = result.speedup, result.speedup_low, result.speedup_high
    if result.baseline is not None and recommended.candidate == result.baseline.candidate:
        return Speeds.OWN
    if speedup is None:
        return Speeds.UNKNOWN
    if low is not None and high is not None:
        if low <= 1 <= high:
            return Speeds.NOT_TOLD_APART
    elif _in_range(result.baseline, recommended):
        return Speeds.NOT_TOLD_APART
    elif f"{speedup:.2f}" == "1.00":
        return Speeds.EQUAL
    return Speeds.FASTER if speedup > 1 else Speeds.SLOWER


def _in_range(baseline: Choosable | None, recommended: Choosable) -> bool:
    """Return whether a further run of the recommendation may be as fast as the baseline was."""
    rate = baseline.tokens_per_second if baseline is not None else None
    low, high = recommended.tokens_per_second_low, recommended.tokens_per_second_high
    return rate is not None and low is not None and high is not None and low <= rate <= high


_EQUALLY_FAST = "equally fast"
_COSTS = 1.02
"""Least ratio of rates that is a cost; rates nearer than that tie (autotune/study/selection.py)."""
_MOST_COSTS = 3
_SAME_STEP = 0.1
"""Relative deviation allowed for the documents of a packed optimizer step."""


@dataclass(frozen=True)
class Cost:
    """The cost in time of keys of the user's own configuration.

    Attributes:
        written: the keys with their values, as in YAML.
        share: of the time of a step with all else as recommended.
    """

    written: str
    share: float

    @property
    def text(self) -> str:
        """The share in words."""
        return f"costs {100 * self.share:.0f} %"


def compared_row(
    label: str,
    recommended: str,
    baseline: str,
    recommended_share: float | None = None,
    baseline_share: float | None = None,
) -> tuple[Cell, ...]:
    """Return a property of the recommendation and the baseline in words, with bars.

    Args:
        recommended_share, baseline_share: 0 to 1 of the budget, or of the faster one's rate; None without a bar.
    """
    return label, recommended, Bar(recommended_share), baseline, Bar(baseline_share, "default")


def comparison(result: Result, recommended: Choosable) -> tuple[tuple[Cell, ...], ...]:
    """Return the rows of the comparison; properties measured for neither are left out."""
    baseline = result.baseline
    rates = [one.tokens_per_second for one in (recommended, baseline) if one is not None]
    fastest = max((rate for rate in rates if rate is not None), default=None)

    def row(
        label: str, text: Callable[[Choosable], str], share: Callable[[Choosable], float | None] | None = None
    ) -> tuple[Cell, ...]:
        return compared_row(
            label,
            text(recommended),
            MISSING if baseline is None else text(baseline),
            share(recommended) if share else None,
            share(baseline) if share and baseline is not None else None,
        )

    drops = any(one.row_coverage < 1 for one in (recommended, baseline) if one is not None)
    rows = [
        row("status", lambda one: status_text(one.status)),
        row(
            "peak memory",
            lambda one: bytes_or_dash(one.peak_bytes),
            lambda one: _over(one.peak_bytes, result.budget_bytes),
        ),
        row("  reserved", lambda one: bytes_or_dash(one.reserved_bytes)),
        row("  on the device", lambda one: bytes_or_dash(one.device_bytes)),
        row(
            "speed", lambda one: rate_or_dash(one.tokens_per_second), lambda one: _over(one.tokens_per_second, fastest)
        ),
        row("  a further run", _expected),
        row("time per epoch", lambda one: _duration(one.seconds_per_epoch)),
        row("time per evaluation", lambda one: _duration(one.evaluation_seconds)),
        row("tokens covered", lambda one: share_text(one.token_coverage)),
        *([row("rows covered", lambda one: share_text(one.row_coverage))] if drops else []),
        row("max_length", lambda one: f"{one.max_length:,}" if one.max_length is not None else "none"),
        row("batch x accumulation", _batch),
        row(f"{find_trainer(result.trainer).counted} per step", lambda one: _number(one.documents_per_step)),
        row("tokens per step", lambda one: number_or_dash(one.tokens_per_step)),
        row("steps per epoch", lambda one: _number(one.steps_per_epoch)),
    ]
    return tuple(row for row in rows if not (row[0] == "status" and _both_ran(result)) and not _empty(row))


def contribution_text(contribution: Contribution) -> str:
    """Return the effect of changing one choice of the winner back to the baseline's."""
    if contribution.speedup is None:
        if contribution.status in (ProbeStatus.OK, ProbeStatus.VETOED):
            return f"not measured: {contribution.reason}" if contribution.reason else "not measured"
        return status_text(contribution.status)
    parts = [_speedup_text(contribution.speedup)]
    if contribution.told_apart is False and parts != [_EQUALLY_FAST]:
        parts = [f"speed not told apart ({parts[0]} in one probe)"]
    if contribution.peak_bytes_saved:
        more = "more" if contribution.peak_bytes_saved > 0 else "less"
        parts.append(f"needs {format_bytes(abs(contribution.peak_bytes_saved))} {more}")
    return ", ".join(parts)


def headline(result: Result, recommended: Choosable) -> str:
    """Return the result in one sentence."""
    baseline, rate = result.baseline, rate_or_dash(recommended.tokens_per_second)
    speeds = compared(result, recommended)
    if speeds is Speeds.OWN:
        if result.status is RunStatus.INTERRUPTED:
            return f"Nothing faster than {_name(result)} was found so far."
        return f"{_name(result, starts=True)} is {result.compared or 'already the fastest candidate that fits'}."
    among = f" It is {result.compared}." if result.compared else ""
    if result.speedup is not None:
        return f"{_speed_text(result, result.speedup, speeds)}{among}"
    if baseline is not None and baseline.status is not ProbeStatus.OK:
        name = _name(result, starts=True)
        return f"{name} does not run here ({status_text(baseline.status)}); this does, at {rate}.{among}"
    return f"This runs at {rate}.{among}" if among else f"The fastest candidate that fits runs at {rate}."


def confirmed_text(result: Result) -> str:
    """Return whether a longer run confirmed the recommendation, and whether the search was interrupted."""
    if result.status is RunStatus.INTERRUPTED:
        confirmed = "confirmed" if result.confirmed else "not confirmed"
        return f"Interrupted: this is the best so far, {confirmed} by a longer run."
    return (
        "Confirmed by a longer run, the worst batch included." if result.confirmed else "Not confirmed by a longer run."
    )


def runs_text(result: Result, recommended: Choosable) -> str:
    """Return how many runs the speed figures are based on, and what their range means."""
    if recommended.tokens_per_second_low is None:
        return "The speed is that of one run, so the spread between runs is not known."
    turns = f", {result.pairs} of them in turn with {_name(result)}" if result.pairs else ""
    return f"The speed is the mean of {recommended.runs} runs{turns}; a further run is in the range in 95 of 100 cases."


def costs_title(file: str) -> str:
    """Return the heading of :func:`costs`."""
    return f"Cost of settings in {printable(file)}, in time of a step with all else as recommended"


def costs(result: Result) -> tuple[Cost, ...]:
    """Return the most expensive settings of the user's own configuration, such as ``gradient_checkpointing: true``."""
    keys = result.base.keys if result.base is not None else {}
    found = [
        Cost(printable(", ".join(f"{key}: {_yaml(value)}" for key, value in keys[item.knob].items())), item.speedup - 1)
        for item in result.contributions
        if item.knob in keys and item.speedup and item.speedup >= _COSTS and item.told_apart is not False
    ]
    return tuple(sorted(found, key=lambda cost: -cost.share)[:_MOST_COSTS])


def step_change_text(result: Result) -> str:
    """Return the consequences for the learning rate and step counts, or an empty text without any."""
    recommended, baseline = result.recommended, result.baseline
    if recommended is None or baseline is None:
        return ""
    ours, theirs = recommended.documents_per_step, baseline.documents_per_step
    if ours is None or theirs is None or abs(ours / theirs - 1) <= _SAME_STEP:
        return ""
    return (
        f"An optimizer step now sees {_number(ours)} documents rather than {_number(theirs)}, so an epoch has "
        f"{_number(recommended.steps_per_epoch)} steps rather than {_number(baseline.steps_per_epoch)}: the learning "
        "rate, and everything counted in steps (warm-up, saving, evaluation), may want adjusting."
    )


def _name(result: Result, *, starts: bool = False) -> str:
    return baseline_name(own=result.base is not None, starts=starts)


def _yaml(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _speedup_text(speedup: float) -> str:
    factor = f"{max(speedup, 1 / speedup):.2f}"
    if factor == "1.00":
        return _EQUALLY_FAST
    return f"{factor}x slower" if speedup > 1 else f"{factor}x faster"


def _speed_text(result: Result, speedup: float, speeds: Speeds) -> str:
    """Return the speed-up and its interval, or that there may be none."""
    factor, low, high = f"{speedup:.2f}x", result.speedup_low, result.speedup_high
    where = f"{_name(result)} at the same global batch of {result.global_batch_size}"
    if low is not None and high is not None:
        factor += f" ({low:.2f} to {high:.2f})"
    if speeds is Speeds.EQUAL:
        return f"As fast as {where}."
    if speeds is Speeds.NOT_TOLD_APART:
        return f"The speed cannot be told apart from that of {where}: {factor}."
    return f"{factor} the speed of {where}."


def _expected(one: Choosable) -> str:
    low, high = one.tokens_per_second_low, one.tokens_per_second_high
    return MISSING if low is None or high is None else f"{low:,.0f} to {high:,.0f}"


def _batch(one: Choosable) -> str:
    return f"{one.per_device_train_batch_size} x {one.gradient_accumulation_steps}"


def _duration(seconds: float | None) -> str:
    return MISSING if seconds is None else format_duration(seconds)


def _number(value: float | None) -> str:
    if value is None:
        return MISSING
    return f"{value:,.0f}" if value == round(value) else f"{value:,.1f}"


def _over(value: float | None, whole: float | None) -> float | None:
    return value / whole if value is not None and whole else None


def _both_ran(result: Result) -> bool:
    return result.baseline is not None and result.baseline.status is ProbeStatus.OK


def _empty(row: tuple[Cell, ...]) -> bool:
    _, recommended, _, baseline, _ = row
    return recommended == MISSING and baseline == MISSING
