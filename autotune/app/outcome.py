"""Converts the outcome of a study into the result document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autotune.app.epoch import epoch_of
from autotune.app.notes import notes_on_loading
from autotune.app.repeated import equally_fast, notes_on_runs, rates_of, speed_up
from autotune.core.candidate import Candidate
from autotune.core.machine import Hardware
from autotune.core.measurement import Measurement
from autotune.core.memory_timeline import MemoryTimeline
from autotune.core.program import AROUND_GENERATION, LOADING, MICRO_BATCH, OPTIMIZER_STEP
from autotune.core.result import SCHEMA, BaseFile, Choosable, LaterFailure, Result, Trial
from autotune.core.spread import mean_rate, next_run, relative_error
from autotune.core.status import OUT_OF_MEMORY, Ending, ProbeStatus, RunStatus
from autotune.inspection.machine import environment
from autotune.study.comparison import runs_after
from autotune.study.problem import Record, SearchOutcome
from autotune.trainers.problem import TrainerProblem
from autotune.units import format_bytes, format_share


@dataclass(frozen=True)
class RunFacts:
    """Facts of a run that its study does not hold.

    Attributes:
        notes: notes for the user, in sentences.
        wall_seconds: since the run began.
        settings: the options that the user set.
        base: the user's configuration that the run started from, or None.
        timelines: the memory of winner and baseline through a step, as far as it was traced.
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
    """Return the document of a search that ended, however it ended."""
    setting = problem.setting
    recommended, baseline = (
        _choosable(record, outcome, problem, facts) if record else None for record in (outcome.winner, outcome.baseline)
    )
    speed = speed_up(outcome.winner, outcome.baseline)
    trials = tuple(_trial(record, problem, outcome.records) for record in outcome.records)
    needs = [
        _need_bytes(record, outcome.records)
        for record, trial in zip(outcome.records, trials, strict=True)
        if not (record.measurement.ok and trial.illegal)
    ]
    return Result(
        schema=SCHEMA,
        status=_status(outcome, trials),
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
        speedup=speed.ratio if speed else None,
        speedup_low=speed.interval.low if speed and speed.interval else None,
        speedup_high=speed.interval.high if speed and speed.interval else None,
        pairs=speed.pairs if speed else 0,
        contributions=outcome.contributions,
        confirmed=outcome.confirmed,
        trials=trials,
        unlockable=problem.space.unlockable,
        left_out=problem.space.left_out,
        notes=(
            *notes_on_runs(outcome, own=facts.base is not None),
            *_contradicted(outcome),
            *(notes_on_loading(outcome.winner.measurement, setting.machine.hardware) if outcome.winner else ()),
            *_notes_on_predictions(setting.machine.hardware, trials),
            *facts.notes,
        ),
        smallest_peak_bytes=min((need for need in needs if need is not None), default=None),
        wall_seconds=facts.wall_seconds,
        settings=facts.settings,
        output_directory=facts.output_directory,
        base=facts.base,
        candidates=problem.size,
        ended=outcome.ending,
        compared=_compared(trials, problem.size, outcome) if recommended else "",
        smallest=outcome.smallest,
    )


def _compared(trials: Sequence[Trial], candidates: int, outcome: SearchOutcome) -> str:
    """Return of how many candidates the recommendation is the fastest, and what ended the search."""
    decided = (ProbeStatus.OK, *OUT_OF_MEMORY)
    count = sum(trial.status in decided and not trial.illegal for trial in trials)
    others, ending = len(equally_fast(outcome)), outcome.ending
    but = f", but for {others:,} that one probe cannot tell from it" if others else ""
    if ending is Ending.EXHAUSTED or count >= candidates:
        return f"the fastest of all candidates{but}" if but else ""
    of = "the only one compared" if count == 1 else f"the fastest of {count:,} compared"
    ended = f"{ending or 'an interruption'} ended the search"
    if ending is Ending.NO_GAIN:
        ended = "less than 1 % is expected of any other"
    return f"{of} of {candidates:,} candidates{but}; {ended}"


def _status(outcome: SearchOutcome, trials: Sequence[Trial]) -> RunStatus:
    if outcome.interrupted:
        return RunStatus.INTERRUPTED
    if outcome.winner:
        return RunStatus.FOUND
    undecided = (ProbeStatus.VETOED, ProbeStatus.TIMEOUT)
    # TRL's default is probed even if it may not be recommended, and shows nothing of the others.
    limited = outcome.ending in (Ending.TIME, Ending.TRIALS)
    decided = any(trial.status not in undecided and not (limited and trial.illegal) for trial in trials)
    return RunStatus.NOTHING_FITS if decided else RunStatus.UNDECIDED


def _contradicted(outcome: SearchOutcome) -> Iterator[str]:
    """Yield a note for each candidate that was predicted not to fit, and fits."""
    for record in outcome.contradicted:
        predicted, shown = record.prediction, record.measurement
        if predicted is not None:
            measured = format_bytes(shown.need_bytes or 0)
            yield (
                f"Trial {record.number} was predicted to need {format_bytes(predicted.need_bytes)}, within "
                f"{format_share(predicted.error)}, and ran with {measured}: the prediction is wrong, please report it."
            )


def _notes_on_predictions(hardware: Hardware, trials: Sequence[Trial]) -> Iterator[str]:
    """Yield how predicted memory differs from measured memory on a CPU."""
    if hardware.kind == "cpu" and any(trial.predicted_bytes is not None for trial in trials):
        yield "On a CPU, measured peaks leave out memory that is never written to; predictions count it."


def _need_bytes(record: Record, records: Sequence[Record]) -> int | None:
    """Return the need of a candidate's probe, or of the later run that failed."""
    return next((run for run in runs_after(record, records) if not run.ok), record.measurement).need_bytes


def _trial(record: Record, problem: TrainerProblem, records: Sequence[Record]) -> Trial:
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
        illegal=problem.illegal(record.candidate) or "",
        later_failure=_later_failure(record, records),
        device_bytes=shown.device_bytes,
    )


def _later_failure(record: Record, records: Sequence[Record]) -> LaterFailure | None:
    failure = next((run for run in runs_after(record, records) if not run.ok), None)
    return LaterFailure(failure is record.confirmation, failure.status, failure.reason) if failure else None


def _choosable(record: Record, outcome: SearchOutcome, problem: TrainerProblem, facts: RunFacts) -> Choosable:
    candidate = record.candidate
    plan = problem.trainer.plan(candidate, problem.setting)
    # A promise of memory must hold in all of them.
    runs = (record.measurement, *runs_after(record, outcome.records))
    shown = record.confirmation if record.confirmation is not None and record.confirmation.ok else record.measurement
    rates = rates_of(record, outcome.winner)
    expected = next_run(rates)
    rate = mean_rate(rates) if rates else None
    drops_last = facts.base is not None and facts.base.args.get("dataloader_drop_last") is True
    epoch = epoch_of(candidate, problem, rate, drops_last=drops_last)
    steps = plan.steps_of_epoch(shown.rows, drops_last=drops_last) if shown.rows else None
    if problem.trainer.generates:
        # No row is packed or dropped, and a probe does not count what an epoch leaves out.
        steps = epoch.steps_per_epoch
    return Choosable(
        number=record.number,
        candidate=candidate,
        plan=plan,
        status=shown.status,
        reason=shown.reason,
        peak_bytes=_highest(runs, "peak_bytes"),
        reserved_bytes=_highest(runs, "reserved_bytes"),
        device_bytes=_highest(runs, "device_bytes"),
        tokens_per_second=rate,
        tokens_per_second_error=relative_error(rates),
        seconds_per_epoch=epoch.seconds_per_epoch,
        token_coverage=epoch.token_coverage,
        row_coverage=epoch.row_coverage,
        max_length=epoch.max_length,
        per_device_train_batch_size=epoch.per_device_train_batch_size,
        gradient_accumulation_steps=epoch.gradient_accumulation_steps,
        documents_per_step=shown.documents_per_step,
        steps_per_epoch=steps,
        tokens_per_second_low=expected.low if expected else None,
        tokens_per_second_high=expected.high if expected else None,
        runs=len(rates),
        tokens_per_step=shown.tokens_per_step,
        peaks={phase: max(run.peaks.get(phase, 0) for run in runs) for phase in shown.peaks},
        seconds=_seconds(shown, epoch.gradient_accumulation_steps),
        evaluation_seconds=shown.evaluation_seconds,
        timeline=facts.timelines.get(candidate),
    )


def _seconds(shown: Measurement, micro_batches: int) -> dict[str, float]:
    """Return the parts of the time of an optimizer step, by phase."""
    if shown.micro_batch_seconds is None or shown.update_seconds is None:
        return {}
    known = dict(shown.generation_phases)
    rest = {AROUND_GENERATION: shown.generation_seconds - sum(known.values())} if shown.generation_seconds else {}
    loading = shown.loading_seconds or 0.0
    return {
        **known,
        **rest,
        LOADING: loading,
        MICRO_BATCH: shown.micro_batch_seconds * micro_batches - loading,
        OPTIMIZER_STEP: shown.update_seconds,
    }


def _highest(runs: Sequence[Measurement], figure: str) -> int | None:
    return max((getattr(run, figure) for run in runs if getattr(run, figure) is not None), default=None)
