"""Sentences on a search that ended without a recommendation: the nearest candidate, and those not tried."""

from __future__ import annotations

from collections.abc import Iterable

from autotune.core.result import Result, Smallest, Trial
from autotune.core.status import OUT_OF_MEMORY, Ending, ProbeStatus
from autotune.reporting.outlook import candidate_name, ran
from autotune.reporting.words import baseline_name, bytes_or_dash, status_text
from autotune.units import format_bytes


def nothing_fits_text(result: Result) -> str:
    """Return that nothing fits, and by how much, and what fits but may not be recommended."""
    barred = [trial for trial in ran(result.trials) if trial.illegal]
    failed = [trial for trial in ran(result.trials) if trial.later_failure is not None and not trial.illegal]
    other = [trial for trial in result.trials if trial.status not in (*OUT_OF_MEMORY, ProbeStatus.VETOED)]
    ended = next((trial for trial in other if trial.status is not ProbeStatus.OK), None)
    if other and not any(_lacked_memory(trial) for trial in result.trials):
        found = f"No candidate can be recommended{_ended_text(ended) if ended is not None else ''}."
    else:
        smallest = result.smallest_peak_bytes
        seen = f"the smallest peak seen was {format_bytes(smallest)}" if smallest is not None else "no peak was seen"
        tried = "" if _is_proven(result) else " that was tried"
        what = "Nothing that may be recommended" if barred else "Nothing"
        found = f"{what}{tried} fits in {format_bytes(result.budget_bytes)} less the margin: {seen}."
    return " ".join((
        found,
        *_nearest_text(result, failed),
        *_smallest_text(result),
        *(_barred_text(result, trial) for trial in barred),
    ))  # fmt: skip


def _is_proven(result: Result) -> bool:
    """Whether no candidate was left, or the one with the smallest predicted need was probed."""
    trial = _trial_of(result, result.smallest)
    if trial is not None:
        return trial.status is not ProbeStatus.VETOED
    return result.ended in (None, Ending.EXHAUSTED)


def _lacked_memory(trial: Trial) -> bool:
    later = trial.later_failure
    return trial.status in OUT_OF_MEMORY or (later is not None and later.status in OUT_OF_MEMORY)


def _ended_text(trial: Trial) -> str:
    reason = f": {trial.reason}" if trial.reason else ""
    return f"; trial {trial.number} ended {status_text(trial.status)}{reason}"


def _nearest_text(result: Result, failed: list[Trial]) -> Iterable[str]:
    """Yield the later failure of the lightest candidate that had fit its probe."""
    trial = min(failed, key=lambda one: _held_bytes(one) or 0, default=None)
    if trial is None or trial.later_failure is None:
        return
    later, limit_bytes = trial.later_failure, int(result.budget_bytes * (1 - result.margin))
    ended = "ran out of memory" if later.status in OUT_OF_MEMORY else f"ended {status_text(later.status)}"
    again = "in the longer run" if later.longer else "in a further run"
    held = f"{bytes_or_dash(_held_bytes(trial))} of {format_bytes(limit_bytes)}"
    yield f"{_name(result, trial)} fit its probe with {held}, and {ended} {again}."


def _smallest_text(result: Result) -> Iterable[str]:
    """Yield the outcome of the candidate with the smallest predicted need."""
    found, trial = result.smallest, _trial_of(result, result.smallest)
    if found is None:
        return
    name = candidate_name(result, found.candidate)
    need = f"The smallest predicted need, {format_bytes(found.predicted_bytes)} ({name}),"
    if trial is None:
        limit = f": {result.ended} ended the search" if result.ended else ""
        yield f"{need} was not tried{limit}."
    elif trial.status is ProbeStatus.VETOED:
        yield f"{need} was not tried: {trial.reason}."
    elif _lacked_memory(trial):
        yield f"{need} ran out of memory in trial {trial.number}."
    else:
        yield f"{need} ended {status_text(trial.status)} in trial {trial.number}."


def _barred_text(result: Result, trial: Trial) -> str:
    held = bytes_or_dash(trial.peak_bytes)
    return f"{_name(result, trial)} fits with {held}, but may not be recommended: {trial.illegal}."


def _name(result: Result, trial: Trial) -> str:
    of_baseline = result.baseline is not None and trial.number == result.baseline.number
    return baseline_name(own=result.base is not None, starts=True) if of_baseline else f"Trial {trial.number}"


def _held_bytes(trial: Trial) -> int | None:
    return trial.reserved_bytes or trial.peak_bytes


def _trial_of(result: Result, smallest: Smallest | None) -> Trial | None:
    number = None if smallest is None else smallest.number
    return next((trial for trial in result.trials if trial.number == number), None)
