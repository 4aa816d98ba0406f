"""From what the study found to the result document."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.core.measurement import Measurement
from autotune.core.result import SCHEMA, Choosable, Result, Trial
from autotune.core.status import ProbeStatus, RunStatus
from autotune.inspection.machine import environment
from autotune.study.problem import Record, SearchOutcome
from autotune.techniques.max_length import token_coverage
from autotune.trainers.problem import TrainerProblem
from autotune.units import format_bytes, format_rate, format_share

# Probes know a rate to about 5 % (core.effort); two runs that are this far apart were not on the same machine.
_STEADY_RATIO = 1.25


@dataclass(frozen=True)
class RunFacts:
    """What a run knows beside its study.

    Attributes:
        notes: what the user should know, in sentences.
        wall_seconds: since the run began.
        settings: what was asked for.
    """

    budget_bytes: int
    margin: float
    notes: tuple[str, ...]
    wall_seconds: float
    settings: dict[str, object]
    output_directory: str


def result_of(outcome: SearchOutcome, problem: TrainerProblem, facts: RunFacts) -> Result:
    """Return the document of a search that ended, however it ended."""
    setting = problem.setting
    recommended = _choosable(outcome.winner, problem) if outcome.winner else None
    baseline = _choosable(outcome.baseline, problem) if outcome.baseline else None
    needs = [_need_bytes(record.measurement) for record in outcome.records]
    return Result(
        schema=SCHEMA,
        status=_status(outcome),
        trainer=problem.trainer.name,
        workload=setting.workload,
        hardware=setting.machine.hardware,
        environment=environment(setting.machine),
        budget_bytes=facts.budget_bytes,
        margin=facts.margin,
        global_batch_size=setting.global_batch_size,
        token_coverage=setting.token_coverage,
        recommended=recommended,
        baseline=baseline,
        speedup=_speedup(outcome.winner, outcome.baseline),
        contributions=outcome.contributions,
        confirmed=outcome.confirmed,
        trials=tuple(_trial(record) for record in outcome.records),
        unlockable=problem.space.unlockable,
        left_out=problem.space.left_out,
        notes=(*_failed_later(outcome), *_contradicted(outcome), *_unsteady(outcome), *facts.notes),
        smallest_peak_bytes=min((need for need in needs if need is not None), default=None),
        wall_seconds=facts.wall_seconds,
        settings=facts.settings,
        output_directory=facts.output_directory,
    )


def _status(outcome: SearchOutcome) -> RunStatus:
    if outcome.interrupted:
        return RunStatus.INTERRUPTED
    if outcome.winner:
        return RunStatus.FOUND
    # A time limit that ends a search before anything is decided does not show that nothing fits.
    decided = any(record.probed and record.measurement.status is not ProbeStatus.TIMEOUT for record in outcome.records)
    return RunStatus.NOTHING_FITS if decided else RunStatus.INTERRUPTED


def _speedup(winner: Record | None, baseline: Record | None) -> float | None:
    """Return the ratio of token rates out of runs of the same length: of two, the one that promises less."""
    if winner is None or baseline is None:
        return None
    pairs = ((winner.measurement, baseline.measurement), (winner.confirmation, baseline.confirmation))
    ratios = [
        ours.tokens_per_second / theirs.tokens_per_second
        for ours, theirs in pairs
        if ours is not None and theirs is not None and ours.tokens_per_second and theirs.tokens_per_second
    ]
    return min(ratios, default=None)


def _failed_later(outcome: SearchOutcome) -> tuple[str, ...]:
    """Return a note for each candidate that its longer run showed not to fit, or not to run."""
    notes = []
    for record in outcome.failed_confirmations:
        is_baseline = outcome.baseline is not None and record.number == outcome.baseline.number
        name = "TRL's default" if is_baseline else f"Trial {record.number}"
        shown = record.confirmation
        if shown is not None:
            notes.append(f"{name} ran in its probe and not in its longer run ({shown.status.value}, {shown.reason}).")
    return tuple(notes)


def _contradicted(outcome: SearchOutcome) -> tuple[str, ...]:
    """Return a note for each candidate that was predicted not to fit, and fits."""
    notes = []
    for record in outcome.contradicted:
        predicted, shown = record.prediction, record.measurement
        if predicted is not None:
            measured = format_bytes(shown.reserved_bytes or shown.peak_bytes or 0)
            notes.append(
                f"Trial {record.number} was predicted to need {format_bytes(predicted.need_bytes)}, within "
                f"{format_share(predicted.error)}, and ran with {measured}: a bug of the prediction, please report it."
            )
    return tuple(notes)


def _unsteady(outcome: SearchOutcome) -> tuple[str, ...]:
    """Return a note when a candidate's two runs disagree by more than their errors explain."""
    notes = []
    for name, record in (("the recommendation", outcome.winner), ("TRL's default", outcome.baseline)):
        if record is None or record.confirmation is None:
            continue
        first, second = record.measurement.tokens_per_second, record.confirmation.tokens_per_second
        if first and second and max(first, second) > _STEADY_RATIO * min(first, second):
            notes.append(
                f"The speed of this machine is not steady: {name} trained at {format_rate(first)} in its first run and "
                f"at {format_rate(second)} in its second. Something else may be using it; figures of speed are rough."
            )
    return tuple(notes[:1])


def _need_bytes(shown: Measurement) -> int | None:
    """Return the peak of a probe that ran, or what one that ran out of memory had held and then asked for."""
    lacked = shown.out_of_memory
    if lacked is None or lacked.held_bytes is None:
        return shown.peak_bytes
    return lacked.held_bytes + (lacked.requested_bytes or 0)


def _trial(record: Record) -> Trial:
    shown = record.measurement
    return Trial(
        number=record.number,
        candidate=record.candidate,
        status=shown.status,
        reason=shown.reason,
        peak_bytes=shown.peak_bytes,
        reserved_bytes=shown.reserved_bytes,
        tokens_per_second=shown.tokens_per_second,
        start_seconds=shown.start_seconds,
        wall_seconds=shown.wall_seconds,
        predicted_bytes=record.prediction.need_bytes if record.prediction else None,
        predicted_tokens_per_second=record.prediction.tokens_per_second if record.prediction else None,
    )


def _choosable(record: Record, problem: TrainerProblem) -> Choosable:
    candidate, setting = record.candidate, problem.setting
    plan = problem.trainer.plan(candidate, setting)
    shown = record.confirmation if record.confirmation is not None and record.confirmation.ok else record.measurement
    coverage = token_coverage(candidate, setting)
    tokens = setting.workload.dataset.lengths.tokens * coverage
    rate = shown.tokens_per_second
    batch = int(candidate["per_device_train_batch_size"])
    return Choosable(
        number=record.number,
        candidate=candidate,
        plan=plan,
        status=shown.status,
        reason=shown.reason,
        peak_bytes=_highest(record, "peak_bytes"),
        reserved_bytes=_highest(record, "reserved_bytes"),
        device_bytes=_highest(record, "device_bytes"),
        tokens_per_second=rate,
        tokens_per_second_error=shown.tokens_per_second_error,
        seconds_per_epoch=tokens / rate if rate else None,
        token_coverage=coverage,
        max_length=_max_length(plan.args.get("max_length"), plan.truncate_to),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=setting.rows_per_process // batch,
        documents_per_step=shown.documents_per_step,
        steps_per_epoch=-(-shown.rows // setting.global_batch_size) if shown.rows else None,
    )


def _max_length(in_args: object, truncate_to: int | None) -> int | None:
    return in_args if isinstance(in_args, int) else truncate_to


def _highest(record: Record, figure: str) -> int | None:
    """Return the larger of what the probe and the longer run showed: a promise of memory must hold in both."""
    shown: list[Measurement] = [run for run in (record.measurement, record.confirmation) if run is not None]
    figures = [getattr(run, figure) for run in shown if getattr(run, figure) is not None]
    return max(figures, default=None)
