"""Texts about a search beyond its recommendation: choices not tried, why nothing fits, how to train or go on."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from autotune.core.candidate import Candidate
from autotune.core.documents.result import Result, Trial
from autotune.core.documents.unsearched import ExcludedChoice, Unlockable
from autotune.core.status import OUT_OF_MEMORY, Ending, ProbeStatus, RunStatus
from autotune.reporting import words
from autotune.trainers import find_trainer
from autotune.units import format_bytes, format_duration, format_share, plural

_REASONS_SHOWN = 4
_MORE = {Ending.TIME: "a longer --timeout", Ending.TRIALS: "more --trials"}
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def trial_counts_text(result: Result) -> str:
    """Return the number of candidates by outcome, and the time taken; of a resumed study, that of the last run."""
    counts = Counter(trial.status for trial in result.trials)
    parts = [f"{counts[status]} {words.status_text(status)}" for status in ProbeStatus if counts[status]]
    candidates = plural(len(result.trials), "candidate") if result.trials else "No candidates"
    listed, taken = f"{': ' if parts else ''}{', '.join(parts)}", format_duration(result.wall_seconds)
    if result.settings.get("resume"):
        return f"{candidates} in the study{listed}; this run took {taken}."
    return f"{candidates} in {taken}{listed}."


def veto_lines(result: Result) -> tuple[str, ...]:
    """Return why candidates were vetoed, the most frequent reasons first, each with its count."""
    vetoed = [trial for trial in result.trials if trial.status is ProbeStatus.VETOED]
    needs = sorted(trial.predicted_bytes for trial in vetoed if trial.predicted_bytes is not None)
    # Reasons that differ only in the predicted size are grouped into one.
    predicted = f"predicted to need {format_bytes(needs[0])}" if needs else ""
    if len(set(needs)) > 1:
        predicted += f" to {format_bytes(needs[-1])}"
    reasons = Counter(trial.reason if trial.predicted_bytes is None else predicted for trial in vetoed).most_common()
    lines = tuple(f"{count} vetoed: {reason}" for reason, count in reasons[:_REASONS_SHOWN])
    rest = sum(count for _, count in reasons[_REASONS_SHOWN:])
    return (*lines, f"{rest} vetoed for other reasons; all are in result.json") if rest else lines


def left_out_lines(left_out: tuple[ExcludedChoice, ...]) -> tuple[str, ...]:
    """Return the choices that were not searched, grouped by knob and reason."""
    together: dict[tuple[str, str], list[str]] = {}
    for item in left_out:
        together.setdefault((item.knob, item.reason), []).append(str(item.choice))
    return tuple(f"{knob} {', '.join(choices)}: {reason}" for (knob, reason), choices in together.items())


def allow_lines(unlockable: Iterable[Unlockable]) -> tuple[str, ...]:
    """Return the choices that each ``--allow`` would add to the candidates."""
    return tuple(
        f"--allow {item.knob} would add {', '.join(str(choice) for choice in item.choices)}"
        + (f" ({item.changes})" if item.changes else "")
        for item in unlockable
    )


def interrupted_text(result: Result) -> str:
    """Return the result of a search that the user or a limit ended before it had a recommendation."""
    if result.status is RunStatus.UNDECIDED:
        more = _MORE.get(result.ended) if result.ended is not None else None
        ended = f"{result.ended.capitalize()} ended the search" if result.ended and more else "The search ended"
        barred = " that may be recommended" if any(trial.illegal for trial in result.trials) else ""
        decided = f"{ended} before any probe decided whether a candidate{barred} fits."
        remedy = [f"Continue with --resume and {more}."] if more else []
        return " ".join((decided, *_barred_texts(result), *remedy))
    allowed = " that may be recommended" if completed_trials(result) else ""
    return f"Interrupted before any candidate{allowed} ran to the end."


def nothing_fits_text(result: Result) -> str:
    """Return why nothing is recommended: the smallest need, failures, and candidates that fit but are not allowed."""
    barred = [trial for trial in completed_trials(result) if trial.illegal]
    decided, ended = (*OUT_OF_MEMORY, ProbeStatus.VETOED, ProbeStatus.OK), ""
    one = next((trial for trial in result.trials if trial.status not in decided), None)
    if one is not None:
        reason = one.reason.rstrip(".")
        ended = f"; probe {one.number} {words.ended_text(one.status)}{f': {reason}' if reason else ''}"
    if result.status is RunStatus.FAILED:
        found = f"No candidate can be recommended{ended}."
    else:
        legal = (trial for trial in result.trials if not trial.illegal and trial.status is not ProbeStatus.VETOED)
        whole = result.ended in (None, Ending.EXHAUSTED) and all(trial.lacked_memory for trial in legal)
        tried = "" if whole else " that was tried"
        what = f"Nothing{' that may be recommended' if barred else ''}{tried}"
        need = _smallest_need_text(result)
        budget = f"{format_bytes(result.budget_bytes)} less the margin of {100 * result.margin:g} %"
        found = f"{what} fits in {budget}: {need}{ended}."
    return " ".join((found, *_barred_texts(result)))


def _barred_texts(result: Result) -> Iterator[str]:
    """Yield the candidates that fit but may not be recommended, with the reason."""
    for trial in completed_trials(result):
        if trial.illegal:
            held = words.bytes_or_dash(trial.used_bytes)
            yield f"{_name(result, trial)} fits with {held}, but may not be recommended: {trial.illegal}."


def _smallest_need_text(result: Result) -> str:
    """Return the smallest need of a search in which nothing fits, or the limit that every candidate reached.

    A limit of a CPU's memory also counts allocated memory that is not yet written, unlike the peak of resident memory.
    """
    smallest, limit_bytes = result.smallest_peak_bytes, int(result.budget_bytes * (1 - result.margin))
    if smallest is None:
        return "no need was measured"
    if smallest > limit_bytes:
        return f"the smallest measured need was {format_bytes(smallest)}"
    least = f", which also counts unwritten memory; the smallest resident peak was {format_bytes(smallest)}"
    return f"memory ran out at {format_bytes(limit_bytes)}{least if result.hardware.kind == 'cpu' else ''}"


def _name(result: Result, trial: Trial) -> str:
    of_baseline = result.baseline is not None and trial.number == result.baseline.number
    return baseline_name(result, capitalized=True) if of_baseline else f"Probe {trial.number}"


def baseline_name(result: Result, *, capitalized: bool = False) -> str:
    """Return the name of a search's baseline."""
    return words.baseline_name(is_users=result.base is not None, capitalized=capitalized)


def candidate_name(result: Result, candidate: Candidate) -> str:
    """Return the differences from the baseline, or all choices if the baseline was never measured."""
    if result.baseline is None:
        return words.format_choices(candidate)
    return words.differences(candidate, result.baseline.candidate, baseline_name(result))


def completed_trials(result: Result) -> list[Trial]:
    """Return the trials whose probe ran to the end."""
    return [trial for trial in result.trials if trial.status is ProbeStatus.OK]


def way_out_lines(result: Result) -> tuple[str, ...]:
    """Return changes outside the searched space that might make a candidate fit."""
    return (
        *allow_lines(result.unlockable),
        *(
            f"--max-length {limit.max_length} would keep {format_share(limit.coverage)} of the tokens"
            + (f" and {format_share(limit.row_coverage)} of the rows" if limit.row_coverage < 1 else "")
            for limit in result.shorter
        ),
        more_memory_text(result.budget_bytes, result.hardware.memory_bytes),
    )


def more_memory_text(budget_bytes: int, device_bytes: int) -> str:
    """Return how to give a training more memory."""
    return "a larger --memory-budget" if budget_bytes < device_bytes else "a device with more memory"


def next_command(result: Result, program: Callable[[str], str] = str) -> str:
    """Return the command that trains as recommended; ``program`` returns the path of a program."""
    bundle, chosen = Path(result.output_directory), result.recommended
    if chosen is not None and not find_trainer(result.trainer).runs_by_command(chosen.plan):
        accelerate = [program("accelerate"), "launch", "--config_file", words.short_path(bundle / "accelerate.yaml")]
        start = accelerate if chosen.plan.in_group else [program("python")]
        return shlex.join([*start, words.short_path(bundle / "train.py")])
    config = words.short_path(bundle / "config.yaml")
    gpu = _first_gpu() if result.hardware.kind == "cuda" and chosen is not None and not chosen.plan.in_group else ""
    variables = "".join(
        f"{name}={shlex.quote(value)} "
        for name, value in result.hardware.environment.items()
        if os.environ.get(name) != value
    )
    return f"{gpu}{variables}{shlex.quote(program('trl'))} {result.trainer} --config {shlex.quote(config)}"


def _first_gpu() -> str:
    """Return the prefix that limits a command to the first visible GPU; empty if only one is visible.

    TRL refuses to train in one process that sees several.
    """
    visible = os.environ.get(_VISIBLE)
    if visible is not None and "," not in visible:
        return ""
    first = visible.split(",")[0] if visible is not None else "0"
    return f"{_VISIBLE}={shlex.quote(first)} "
