"""Texts that compare the recommendation of a search with its baseline: speed-up, memory, step size, costs."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.core.documents.result import Contribution, MeasuredCandidate, Result
from autotune.core.files.yaml_text import yaml_line
from autotune.core.spread import TIE, Interval, for_later_run
from autotune.core.status import ProbeStatus, RunStatus
from autotune.reporting import words
from autotune.reporting.document import Cell, Code, Line
from autotune.reporting.outlook import baseline_name
from autotune.reporting.sections import Value, comparison_rows, epoch_values
from autotune.techniques.per_device_train_batch_size import NEAR_STEP
from autotune.trainers import find_trainer
from autotune.units import format_bytes, plural

_MAX_COSTS = 3
_UNKNOWN = 10.0
"""Ratio of the upper bound of a speed-up's or rate's interval to its mean above which it is reported as unknown; the
interval is symmetric in ratio."""


def comparison_of_search(result: Result, recommended: MeasuredCandidate) -> tuple[tuple[Cell, ...], ...]:
    """Return the rows of the comparison; properties measured for neither are left out."""
    baseline = result.baseline
    compared = [recommended] if baseline is None else [recommended, baseline]
    chosen, *others = (_values(result, one, compared) for one in compared)
    if baseline is not None and baseline.status is ProbeStatus.OK:
        del chosen["status"]
    return comparison_rows(chosen, others[0] if others else {})


def _values(result: Result, candidate: MeasuredCandidate, compared: Sequence[MeasuredCandidate]) -> dict[str, Value]:
    evaluations = [each.evaluation_seconds for each in compared]
    return {
        "status": Value(words.status_text(candidate.status)),
        "memory used": Value(words.bytes_or_dash(candidate.used_bytes), candidate.used_bytes, result.budget_bytes),
        "  reserved": Value(words.bytes_or_dash(candidate.reserved_bytes)),
        "  allocated": Value(words.bytes_or_dash(None if candidate.reserved_bytes is None else candidate.peak_bytes)),
        "speed": Value(words.rate_or_dash(candidate.tokens_per_second), candidate.tokens_per_second),
        "  95 % range": Value(_range_text(candidate)),
        "time per evaluation": Value(words.duration_or_dash(candidate.evaluation_seconds, evaluations)),
        **epoch_values(candidate, compared, find_trainer(result.trainer).document_noun),
    }


def contribution_text(contribution: Contribution) -> str:
    """Return the effect of changing one choice of the winner back to the baseline's."""
    if contribution.speedup is None:
        if contribution.status in (ProbeStatus.OK, ProbeStatus.VETOED):
            return f"not measured: {contribution.reason}" if contribution.reason else "not measured"
        return words.status_text(contribution.status)
    speedup, saved = contribution.speedup, contribution.peak_bytes_saved
    factor = f"{max(speedup, 1 / speedup):.2f}"
    text = "equally fast" if factor == "1.00" else f"{factor}x {'slower' if speedup > 1 else 'faster'}"
    if contribution.significant is False and factor != "1.00":
        text = f"{text} in one probe, within run-to-run variation"
    return f"{text}; needs {format_bytes(abs(saved))} {'more' if saved > 0 else 'less'}" if saved else text


def headline(result: Result, recommended: MeasuredCandidate) -> str:
    """Return the result in one sentence."""
    name = baseline_name(result, capitalized=True)
    baseline, rate = result.baseline, words.rate_or_dash(recommended.tokens_per_second)
    if baseline is not None and recommended.candidate == baseline.candidate:
        if result.status is RunStatus.INTERRUPTED:
            return f"Nothing faster than {baseline_name(result)} was found so far."
        return f"{name} is {result.compared or 'already the fastest candidate that fits'}."
    among = f" It is {result.compared}." if result.compared else ""
    if result.speedup is not None:
        return f"{_speed_text(result, recommended, result.speedup)}{among}"
    if baseline is not None and baseline.status is not ProbeStatus.OK:
        return f"{name} {words.ended_text(baseline.status)}; this runs at {rate}.{among}"
    return f"This runs at {rate}.{among}" if among else f"The fastest candidate that fits runs at {rate}."


def confirmed_text(result: Result) -> str:
    """Return whether a longer run confirmed the recommendation, and whether the search was interrupted."""
    by = "Confirmed by a longer run with the worst batch" if result.confirmed else "Not confirmed by a longer run"
    return f"{'Interrupted: this is the best so far. ' if result.status is RunStatus.INTERRUPTED else ''}{by}."


def runs_text(result: Result, recommended: MeasuredCandidate) -> str:
    """Return the number of runs behind the speed figures, and the meaning of their range."""
    if recommended.tokens_per_second_low is None:
        return "The speed is that of one run, so the spread between runs is not known."
    turns = f", {result.pairs} of them alternating with {baseline_name(result)}" if result.pairs else ""
    return f"The speed is the mean of {recommended.runs} runs{turns}. Its 95 % range is for a single later run."


def costs(result: Result) -> tuple[Line, ...]:
    """Return the most expensive settings of the user's own configuration, such as ``gradient_checkpointing: true``."""
    keys = result.base.keys if result.base is not None else {}
    found = [
        (item.speedup, ", ".join(f"{key}: {yaml_line(value)}" for key, value in keys[item.knob].items()))
        for item in result.contributions
        if item.knob in keys and item.speedup and item.speedup >= 1 + TIE and item.significant is not False
    ]
    most = sorted(found, key=lambda cost: -cost[0])[:_MAX_COSTS]
    return tuple((Code(words.printable(written)), f"costs {100 * (speedup - 1):.0f} %") for speedup, written in most)


def step_change_text(result: Result) -> str:
    """Return the consequences for the learning rate and step counts, or an empty text without any."""
    recommended, baseline = result.recommended, result.baseline
    if recommended is None or baseline is None:
        return ""
    ours, theirs = recommended.documents_per_step, baseline.documents_per_step
    if ours is None or theirs is None or abs(ours / theirs - 1) <= NEAR_STEP:
        return ""
    counts = ours, theirs, recommended.steps_per_epoch, baseline.steps_per_epoch
    rows, default_rows, steps, default_steps = map(words.mean_or_dash, counts)
    noun, of_epoch = find_trainer(result.trainer).document_noun, "step" if steps == "1" else "steps"
    noun = noun.removesuffix("s") if rows == "1" else noun
    return (
        f"An optimizer step has {rows} {noun} instead of {default_rows}, and an epoch {steps} {of_epoch} instead of "
        f"{default_steps}: the learning rate, and everything counted in steps (warm-up, saving, evaluation), may need "
        "adjusting."
    )


def _speed_text(result: Result, recommended: MeasuredCandidate, speedup: float) -> str:
    """Return a sentence on the speed-up and its interval.

    Without an interval, the two cannot be told apart if the baseline's speed is in the range of the recommendation's.
    """
    where = f"{baseline_name(result)} at the same global batch of {result.global_batch_size}"
    factor, low, high = f"{speedup:.2f}x", result.speedup_low, result.speedup_high
    if high is not None and high > _UNKNOWN * speedup:
        return f"The speed-up over {where} is not known: {plural(result.pairs, 'pair')} of runs differ too much."
    if low is not None and high is not None:
        factor += f" (95 % CI {low:.2f} to {high:.2f})"
        significant = not low <= 1 <= high
    else:
        significant = not _in_range(result.baseline, recommended)
        if significant and factor == "1.00x":
            return f"As fast as {where}."
    if not significant:
        return f"As fast as {where} within run-to-run variation: {factor}."
    if low is None or high is None:
        once = recommended.runs == 1 and (result.baseline is None or result.baseline.runs == 1)
        runs = "one run each: the spread is not known" if once else "too few pairs of runs for a 95 % interval"
        return f"{factor} the speed of {where}, by {runs}."
    return f"{factor} the speed of {where}."


def _in_range(baseline: MeasuredCandidate | None, recommended: MeasuredCandidate) -> bool:
    """Return whether the baseline's speed is in the range of a further run of the recommendation.

    Without that range, each of the two speeds is of one run, and has at least the range of a run at a later time.
    """
    rate, own = baseline.tokens_per_second if baseline is not None else None, recommended.tokens_per_second
    low, high = recommended.tokens_per_second_low, recommended.tokens_per_second_high
    if rate is None or own is None:
        return False
    return rate in (
        for_later_run(for_later_run(Interval(own, own))) if low is None or high is None else Interval(low, high)
    )


def _range_text(candidate: MeasuredCandidate) -> str:
    low, high = candidate.tokens_per_second_low, candidate.tokens_per_second_high
    if low is None or high is None:
        return words.MISSING
    return "not known" if high > _UNKNOWN**2 * low else f"{low:,.0f} to {high:,.0f}"
