"""Sentences on vetoed candidates, choices that were not searched, and further options."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from autotune.core.candidate import Candidate
from autotune.core.result import Result, Trial
from autotune.core.status import ProbeStatus
from autotune.core.unsearched import LeftOut, Unlockable
from autotune.reporting.words import (
    baseline_name,
    bytes_or_dash,
    differences,
    kept_text,
    rate_or_dash,
    short_path,
    status_text,
    written,
)
from autotune.trainers import find_trainer
from autotune.units import format_bytes, format_duration

_REASONS_SHOWN = 4
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def trial_counts_text(result: Result) -> str:
    """Return the number of candidates by outcome, and the time taken."""
    counts = Counter(trial.status for trial in result.trials)
    parts = [f"{counts[status]} {status_text(status)}" for status in ProbeStatus if counts[status]]
    number = len(result.trials)
    tried = f"{number or 'no'} candidate{'' if number == 1 else 's'} in {format_duration(result.wall_seconds)}"
    return f"{tried[:1].upper()}{tried[1:]}{': ' if parts else ''}{', '.join(parts)}."


def veto_lines(result: Result) -> tuple[str, ...]:
    """Return why candidates were vetoed, the most frequent reasons first, each with its count."""
    vetoed = [trial for trial in result.trials if trial.status is ProbeStatus.VETOED]
    needs = sorted(trial.predicted_bytes for trial in vetoed if trial.predicted_bytes is not None)
    # Every predicted size is a reason of its own; they are grouped into one.
    predicted = f"predicted to need {format_bytes(needs[0])}" if needs else ""
    if len(set(needs)) > 1:
        predicted += f" to {format_bytes(needs[-1])}"
    reasons = Counter(trial.reason if trial.predicted_bytes is None else predicted for trial in vetoed)
    lines = [f"{count} vetoed: {reason}" for reason, count in reasons.most_common(_REASONS_SHOWN)]
    rest = sum(reasons.values()) - sum(count for _, count in reasons.most_common(_REASONS_SHOWN))
    return (*lines, f"{rest} vetoed for other reasons; all are in result.json") if rest else tuple(lines)


def left_out_lines(left_out: tuple[LeftOut, ...]) -> tuple[str, ...]:
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


def best_so_far(trials: tuple[Trial, ...]) -> Trial | None:
    """Return the fastest trial that ran to the end and may be recommended, or None without any."""
    found = [trial for trial in ran(trials) if not trial.illegal and trial.tokens_per_second is not None]
    return max(found, key=lambda trial: trial.tokens_per_second or 0.0, default=None)


def interrupted_text(result: Result) -> str:
    """Return the result of an interrupted run so far."""
    best = best_so_far(result.trials)
    if best is None:
        allowed = " that may be recommended" if ran(result.trials) else ""
        return f"Interrupted before any candidate{allowed} ran to the end."
    return (
        f"Interrupted. Best so far, not confirmed by a longer run: {candidate_name(result, best.candidate)} "
        f"at {rate_or_dash(best.tokens_per_second)}, peak {bytes_or_dash(best.peak_bytes)}."
    )


def candidate_name(result: Result, candidate: Candidate) -> str:
    """Return the differences from the baseline, or all choices if the baseline was never measured."""
    if result.baseline is None:
        return written(candidate)
    return differences(candidate, result.baseline.candidate, baseline_name(own=result.base is not None))


def ran(trials: Iterable[Trial]) -> list[Trial]:
    """Return the trials whose probe ran to the end."""
    return [trial for trial in trials if trial.status is ProbeStatus.OK]


def way_out_lines(result: Result) -> tuple[str, ...]:
    """Return changes that might make a candidate fit; no candidate of the search has them."""
    documents = result.workload.dataset.documents
    if find_trainer(result.workload.trainer).generates:
        # Prompts are never cut.
        return (*allow_lines(result.unlockable), "a larger --memory-budget")
    failed = [trial for trial in result.trials if not trial.illegal]
    shortest = min([*_lengths(failed), documents.longest])
    # A length that keeps too few tokens may have run all the same: TRL's default is always probed.
    known = [length for length in _lengths(ran(result.trials)) if length < shortest]
    shorter = sorted({shortest // 2, shortest // 4, *known}, reverse=True)
    return (
        *allow_lines(result.unlockable),
        *(
            f"--max-length {length} would keep {kept_text(documents, length)}"
            for length in shorter
            if documents.row_coverage(length) > 0
        ),
        "a larger --memory-budget",
    )


def _lengths(trials: Iterable[Trial]) -> list[int]:
    return [int(trial.candidate["max_length"]) for trial in trials if "max_length" in trial.candidate]


def next_command(result: Result, trl: str = "trl") -> str:
    """Return the command that trains as recommended; ``trl`` is how that program is started."""
    bundle, chosen = Path(result.output_directory), result.recommended
    if chosen is not None and not find_trainer(result.trainer).runs_by_command(chosen.plan):
        accelerate = ["accelerate", "launch", "--config_file", short_path(bundle / "accelerate.yaml")]
        return shlex.join([*(accelerate if chosen.plan.in_group else ["python"]), short_path(bundle / "train.py")])
    config = short_path(bundle / "config.yaml")
    gpu = _first_gpu() if result.hardware.kind == "cuda" and chosen is not None and not chosen.plan.in_group else ""
    variables = "".join(
        f"{name}={shlex.quote(value)} "
        for name, value in result.hardware.environment.items()
        if os.environ.get(name) != value
    )
    return f"{gpu}{variables}{shlex.quote(trl)} {result.trainer} --config {shlex.quote(config)}"


def _first_gpu() -> str:
    """Return the prefix that limits a command to the first visible GPU; empty if only one is visible.

    TRL refuses to train in one process that sees several.
    """
    visible = os.environ.get(_VISIBLE)
    if visible is not None and "," not in visible:
        return ""
    first = visible.split(",")[0] if visible is not None else "0"
    return f"{_VISIBLE}={shlex.quote(first)} "
