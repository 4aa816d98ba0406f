"""Converts the outcome of a study into the document ``result.json``, with notes on its measurements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autotune.app.epoch import epoch_of
from autotune.app.notes import notes_on_launcher, notes_on_loading
from autotune.core.candidate import Candidate
from autotune.core.documents.length_report import LengthLimit, histogram, limit
from autotune.core.documents.memory_timeline import MemoryTimeline
from autotune.core.documents.result import BaseFile, LaterFailure, MeasuredCandidate, Result, Trial
from autotune.core.measurement import Measurement
from autotune.core.program import AROUND_GENERATION, LOADING, MICRO_BATCH, OPTIMIZER_STEP
from autotune.core.spread import for_later_run, mean_interval, mean_rate, prediction_interval
from autotune.core.status import OUT_OF_MEMORY, Ending, ProbeStatus, RunStatus
from autotune.core.workload import Workload
from autotune.inspection.machine import environment
from autotune.reporting.words import baseline_name, differences, ended_text
from autotune.study.comparison import pairs, runs_after
from autotune.study.problem import Record, SearchOutcome
from autotune.trainers.base import Trainer
from autotune.trainers.length_limit import length_limit, limits_rows
from autotune.trainers.problem import TrainerProblem
from autotune.units import format_bytes, format_share, plural

_MEMORY_FIGURES = ("peak_bytes", "reserved_bytes", "device_bytes")
_TRIAL_FIGURES = ("status", "reason", "start_seconds", "wall_seconds", *_MEMORY_FIGURES)
"""Fields that a trial copies from its measurement."""
_WORTH_NAMING = 0.05
"""Share of the winner's memory that another candidate has to save to be named: peaks on a CPU scatter by as much."""


@dataclass(frozen=True)
class RunFacts:
    """Facts of a run for its result that are not in its study.

    Attributes:
        notes: notes for the user, in sentences.
        wall_seconds: time since the start of the run.
        settings: the options that the user set.
        base: the user's configuration that the run started from, or None.
        timelines: the traced memory of winner and baseline through a step, if there is a trace.
    """

    budget_bytes: int
    margin: float
    notes: tuple[str, ...]
    wall_seconds: float
    settings: Mapping[str, object]
    output_directory: str
    base: BaseFile | None = None
    timelines: Mapping[Candidate, MemoryTimeline] = field(default_factory=dict)


def result_of(outcome: SearchOutcome, problem: TrainerProblem, facts: RunFacts) -> Result:
    """Return the document of a search that ended in any status."""
    setting, trainer, workload, own = problem.setting, problem.trainer, problem.setting.workload, facts.base is not None
    recommended, baseline = (
        _measured(record, outcome, problem, facts) if record else None for record in (outcome.winner, outcome.baseline)
    )
    runs = [(record, failure_of(record, outcome.records)) for record in outcome.records]
    trials = tuple(_trial(record, failure, problem) for record, failure in runs)
    needs = [
        (failure or record.measurement).need_bytes
        for (record, failure), trial in zip(runs, trials, strict=True)
        if not (record.measurement.ok and trial.illegal)
    ]
    return Result(
        status=_status(outcome, trials),
        trainer=trainer.name,
        workload=workload,
        hardware=setting.machine.hardware,
        environment=environment(setting.machine),
        budget_bytes=facts.budget_bytes,
        margin=facts.margin,
        global_batch_size=setting.global_batch_size,
        token_coverage=setting.token_coverage,
        recommended=recommended,
        baseline=baseline,
        **_speed_up(outcome.winner, outcome.baseline),
        contributions=outcome.contributions,
        confirmed=outcome.confirmed,
        trials=trials,
        unlockable=problem.space.unlockable,
        left_out=problem.space.left_out,
        notes=(
            *_notes_on_failures(outcome, is_users=own),
            *_notes_on_equally_fast(outcome),
            *_notes_on_contradictions(outcome, int(facts.budget_bytes * (1 - facts.margin))),
            *(notes_on_loading(outcome.winner.measurement, setting.machine.hardware) if outcome.winner else ()),
            *(notes_on_launcher(recommended, setting.machine.hardware) if recommended else ()),
            *facts.notes,
        ),
        smallest_peak_bytes=min((need for need in needs if need is not None), default=None),
        wall_seconds=facts.wall_seconds,
        settings=facts.settings,
        output_directory=facts.output_directory,
        base=facts.base,
        candidates=problem.size,
        ended=outcome.ending,
        compared=_compared_text(trials, problem.size, outcome) if recommended else "",
        smallest=outcome.smallest,
        lengths=histogram(workload.dataset.documents),
        limit=length_limit(trainer, setting, recommended.candidate) if recommended else None,
        shorter=() if recommended else shorter_limits(trials, trainer, workload),
    )


def shorter_limits(trials: Sequence[Trial], trainer: Trainer, workload: Workload) -> tuple[LengthLimit, ...]:
    """Return maximum lengths below the searched ones, with their coverage; empty if the trainer limits no rows."""
    documents = workload.dataset.documents
    if not limits_rows(trainer):
        return ()
    tried = [(trial, int(trial.candidate["max_length"])) for trial in trials if "max_length" in trial.candidate]
    shortest = min([*(length for trial, length in tried if not trial.illegal), documents.longest])
    # TRL's default is always probed, even if its maximum length keeps too few tokens.
    ran = [length for trial, length in tried if trial.status is ProbeStatus.OK and length < shortest]
    lengths = sorted({shortest // 2, shortest // 4, *ran}, reverse=True)
    kept = (limit(documents, length) for length in lengths if length >= workload.least_length)
    return tuple(each for each in kept if each.row_coverage)


def _compared_text(trials: Sequence[Trial], candidates: int, outcome: SearchOutcome) -> str:
    """Return the number of candidates that the recommendation was compared with, and the end of the search."""
    decided = (ProbeStatus.OK, *OUT_OF_MEMORY)
    count = sum(trial.status in decided and not trial.illegal for trial in trials)
    others, ending = len(equally_fast(outcome)), outcome.ending
    verb = "is" if others == 1 else "are"
    tied = f"; {plural(others, 'other')} {verb} as fast within run-to-run variation" if others else ""
    if ending is Ending.EXHAUSTED or count >= candidates:
        return f"the fastest of all candidates{tied}" if tied else ""
    of = "the only compared candidate" if count == 1 else f"the fastest of {count:,} compared candidates"
    return f"{of} out of {candidates:,}{tied}; {ending or 'an interruption'} ended the search"


def _status(outcome: SearchOutcome, trials: Sequence[Trial]) -> RunStatus:
    if outcome.interrupted:
        return RunStatus.INTERRUPTED
    if outcome.winner:
        return RunStatus.FOUND
    undecided = (ProbeStatus.VETOED, ProbeStatus.TIMEOUT)
    # TRL's default is probed even if it may not be recommended; its failure proves nothing about other candidates.
    limited = outcome.ending in (Ending.TIME, Ending.TRIALS)
    decided = [trial for trial in trials if trial.status not in undecided and not (limited and trial.illegal)]
    if not decided:
        return RunStatus.UNDECIDED
    return RunStatus.NOTHING_FITS if any(trial.lacked_memory for trial in decided) else RunStatus.FAILED


def _notes_on_contradictions(outcome: SearchOutcome, limit_bytes: int) -> Iterator[str]:
    """Yield a note for each candidate that fits although it was predicted not to, within the stated error."""
    for record in outcome.records:
        predicted, shown = record.prediction, record.measurement
        if predicted is not None and shown.ok and predicted.over(limit_bytes):
            measured = format_bytes(shown.need_bytes or 0)
            yield (
                f"Probe {record.number} was predicted to need {format_bytes(predicted.need_bytes)}, "
                f"±{format_share(predicted.error)}, but ran with {measured}. Please report this wrong prediction."
            )


def _trial(record: Record, failure: Measurement | None, problem: TrainerProblem) -> Trial:
    """Return a candidate's trial: its probe, its rate in later runs, and the later run that failed, if any."""
    return Trial(
        number=record.number,
        candidate=record.candidate,
        **{name: getattr(record.measurement, name) for name in _TRIAL_FIGURES},
        tokens_per_second=record.tokens_per_second or None,
        predicted_bytes=record.prediction.need_bytes if record.prediction else None,
        predicted_tokens_per_second=record.prediction.tokens_per_second if record.prediction else None,
        illegal=problem.illegal(record.candidate) or "",
        later_failure=LaterFailure(failure is record.confirmation, failure.status, failure.reason) if failure else None,
    )


def _measured(record: Record, outcome: SearchOutcome, problem: TrainerProblem, facts: RunFacts) -> MeasuredCandidate:
    candidate = record.candidate
    plan = problem.trainer.plan(candidate, problem.setting)
    # The promised memory must hold in all runs.
    runs = (record.measurement, *runs_after(record, outcome.records))
    shown = record.confirmation if record.confirmation is not None and record.confirmation.ok else record.measurement
    sizes = {name: [getattr(run, name) for run in runs] for name in _MEMORY_FIGURES}
    most_bytes: dict[str, Any] = {
        name: max((size for size in each if size is not None), default=None) for name, each in sizes.items()
    }
    rates, winner = rates_of(record, outcome.winner), outcome.winner
    in_turn = winner.rates if winner is not None and winner.number != record.number else record.baseline_rates
    soon = prediction_interval(rates, in_turn)
    expected = for_later_run(soon) if soon is not None else None
    rate = mean_rate(rates) if rates else None
    drops_last = facts.base is not None and facts.base.args.get("dataloader_drop_last") is True
    epoch = epoch_of(candidate, problem, rate, drops_last=drops_last)
    # A probe trains and evaluates on all rows; TRL splits off the rows for evaluation (`test_split_size`).
    workload, evaluation = problem.setting.workload, shown.evaluation_seconds
    share = workload.documents_trained / workload.dataset.documents.rows
    if evaluation is not None and share < 1:
        evaluation *= 1 - share
    steps = plan.steps_of_epoch(round(shown.rows * share), drops_last=drops_last) if shown.rows else None
    if problem.trainer.generates:
        # No row is packed or dropped, and a probe does not count the rows that an epoch leaves out.
        steps = epoch.steps_per_epoch
    documents, tokens = shown.documents_per_step, shown.tokens_per_step
    epoch = replace(epoch, documents_per_step=documents, tokens_per_step=tokens, steps_per_epoch=steps)
    return MeasuredCandidate(
        number=record.number,
        candidate=candidate,
        plan=plan,
        status=shown.status,
        reason=shown.reason,
        **most_bytes,
        tokens_per_second=rate,
        tokens_per_second_low=expected.low if expected else None,
        tokens_per_second_high=expected.high if expected else None,
        runs=len(rates),
        peaks={phase: max(run.peaks.get(phase, 0) for run in runs) for phase in shown.peaks},
        seconds=_seconds(shown, epoch.gradient_accumulation_steps),
        evaluation_seconds=evaluation,
        timeline=facts.timelines.get(candidate),
        **vars(epoch),
    )


def _seconds(run: Measurement, micro_batches: int) -> dict[str, float]:
    """Return the parts of the time of an optimizer step, by phase."""
    if run.micro_batch_seconds is None or run.update_seconds is None:
        return {}
    known = dict(run.generation_phases)
    rest = {AROUND_GENERATION: run.generation_seconds - sum(known.values())} if run.generation_seconds else {}
    loading = run.loading_seconds or 0.0
    return {
        **known,
        **rest,
        LOADING: loading,
        MICRO_BATCH: run.micro_batch_seconds * micro_batches - loading,
        OPTIMIZER_STEP: run.update_seconds,
    }


def rates_of(record: Record, winner: Record | None) -> tuple[float, ...]:
    """Return the token rates from which a record's promised rate is computed.

    They are the rates of its longer run and its short runs. Both time steps in the same way; if whole steps were slower
    than the composed steps of short runs, the spread would show it. The probe is excluded if there are other runs,
    since the winner was selected for a high rate in its probe (selection bias). The baseline's rates are those of its
    runs that alternate with the winner's, without a longer run of its own, so that the two are comparable.
    """
    rates = winner.baseline_rates if winner is not None and winner.number != record.number else ()
    return rates or record.rates or tuple(rate for rate in (record.measurement.tokens_per_second,) if rate)


def _speed_up(winner: Record | None, baseline: Record | None) -> dict[str, Any]:
    """Return the winner's token rate over the baseline's, by the names of the result's fields.

    It is unknown if either did not run; without pairs of alternating runs it is the ratio of the two probes.
    """
    if winner is None or baseline is None:
        return {"speedup": None}
    if winner.number == baseline.number:
        return {"speedup": 1.0}
    found = [ratio for ratio in (_ratio(ours, theirs) for ours, theirs in pairs(winner)) if ratio is not None]
    if not found:
        return {"speedup": _ratio(winner.measurement, baseline.measurement)}
    interval = mean_interval(found)
    low, high = (interval.low, interval.high) if interval is not None else (None, None)
    return {"speedup": mean_rate(found), "speedup_low": low, "speedup_high": high, "pairs": len(found)}


def failure_of(record: Record, records: Iterable[Record]) -> Measurement | None:
    """Return the first run after a record's probe that did not end ``ok``, its comparison runs included; else None."""
    return next((run for run in runs_after(record, records) if not run.ok), None)


def _ratio(measurement: Measurement, reference: Measurement) -> float | None:
    if not measurement.tokens_per_second or not reference.tokens_per_second:
        return None
    return measurement.tokens_per_second / reference.tokens_per_second


def _notes_on_failures(outcome: SearchOutcome, *, is_users: bool) -> Iterator[str]:
    """Yield a note for each candidate that ran in its probe and failed in a later run.

    Args:
        is_users: whether the baseline is the user's own configuration.
    """
    baseline = outcome.baseline
    for record in outcome.failed_confirmations:
        of_baseline = baseline is not None and record.number == baseline.number
        name = baseline_name(is_users=is_users, capitalized=True) if of_baseline else f"Probe {record.number}"
        failure = failure_of(record, outcome.records)
        assert failure is not None
        yield f"{name} ran in its probe, and {ended_text(failure.status)} in a later run ({failure.reason})."


def equally_fast(outcome: SearchOutcome) -> tuple[Record, ...]:
    """Return the other candidates whose rate, mostly of one probe, reaches the interval of a further run of the winner.

    With a single run of the winner there is no interval, and the result is empty. The winner's own probe is excluded,
    since it was selected for its high rate. The baseline is excluded, since its alternating runs with the winner are
    better evidence than a probe.
    """
    winner, baseline = outcome.winner, outcome.baseline
    expected = winner.prediction_interval if winner is not None else None
    if winner is None or expected is None:
        return ()
    known = {record.number for record in (winner, baseline) if record is not None}
    others = (record for record in outcome.records if record.number not in known)
    ran = (record for record in others if record.measurement.ok and record.failure is None)
    return tuple(record for record in ran if record.tokens_per_second >= expected.low)


def _notes_on_equally_fast(outcome: SearchOutcome) -> Iterator[str]:
    """Yield a note if a candidate as fast as the winner needs less memory: on the one that needs the least."""
    winner, baseline, others = outcome.winner, outcome.baseline, equally_fast(outcome)
    if winner is None or baseline is None or not others:
        return
    lightest = min(others, key=lambda record: record.measurement.need_bytes or 0)
    least = lightest.measurement.need_bytes or 0
    ours = max(run.need_bytes or 0 for run in (winner.measurement, *winner.runs))
    if least < (1 - _WORTH_NAMING) * ours:
        which = f"probe {lightest.number} ({differences(lightest.candidate, baseline.candidate)})"
        yield (
            f"Of the candidates as fast within run-to-run variation, {which} needs the least memory:"
            f" {format_bytes(least)} instead of {format_bytes(ours)}."
        )
