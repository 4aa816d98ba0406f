"""The state that the phases of a search share: the records, the clock, and the methods that run probes."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from statistics import fmean

from autotune.core.candidate import Candidate
from autotune.core.effort import Effort
from autotune.core.events import CandidateVetoed, Listener, Noted, ProbeFinished, ProbeStarted, StudyResumed
from autotune.core.measurement import Measurement
from autotune.core.prediction import Predictor
from autotune.core.status import ProbeStatus
from autotune.errors import AutotuneError
from autotune.study.comparison import next_turn, wanted_runs
from autotune.study.durations import WHOLE_STEPS, Clock, pair_seconds, short_runs
from autotune.study.judge import Judge, Veto, leader
from autotune.study.problem import ComparisonTurn, Probe, ProbeRun, Problem, Purpose, Record
from autotune.study.trial_log import TrialLog

_MAX_CONFIRMED = 3
"""Number of confirmed candidates after which no further ones are confirmed."""


class TurnLost(Exception):  # noqa: N818 (nothing has failed)
    """This worker's lease lapsed, so another worker may be confirming."""


class Session:
    """One run of a search.

    :meth:`refresh` reads the records of other workers of the study, as does each probe.

    Attributes:
        baseline_candidate: the baseline in its normal form.
        trials: maximum number of probes, including those of earlier runs, excluding confirmations.
        predictor: receives every measurement.
        vetoed_traces: candidates that were traced and vetoed since the last probe.
        without_gain: number of the leader, and how many times in a row the expected improvement on it was too small.
        cut_off: probes that the time limit ended. They count as trials of this run, which does not repeat them; the
            study does not store them, so that a resumed run does.
    """

    def __init__(
        self,
        problem: Problem,
        probe: Probe,
        log: TrialLog,
        effort: Effort,
        trials: int,
        clock: Clock,
        listener: Listener,
        predictor: Predictor,
    ) -> None:
        self.problem = problem
        self.log = log
        self.effort = effort
        self.trials = trials
        self.clock = clock
        self.predictor = predictor
        self.judge = Judge(problem, predictor, log.memory_limit_bytes)
        self.vetoed_traces = 0
        self.without_gain = (-1, 0)
        self.cut_off: list[Record] = []
        self._probe = probe
        self._listener = listener
        self._confirmed = 0
        # Records of earlier runs are learnt here, and reported by `report_resumed`.
        self._own_numbers = {record.number for record in log.records}
        self.baseline_candidate = problem.normal(problem.baseline)
        self._learn_new_records()

    @property
    def probes_left(self) -> int:
        """Number of probes that the trial limit still allows, minus running ones."""
        return self._trials_left - self._counted_probes - len(self.log.running)

    @property
    def _trials_left(self) -> int:
        """The trial limit minus the number of probes that the time limit ended."""
        return self.trials - len(self.cut_off)

    @property
    def _counted_probes(self) -> int:
        return sum(record.probed for record in self.log.records)

    @property
    def baseline(self) -> Record | None:
        """The baseline's record, or None before it was reached."""
        records = (*self.log.records, *self.cut_off)
        return next((record for record in records if record.candidate == self.baseline_candidate), None)

    def leader(self) -> Record | None:
        """Return the record to recommend so far.

        If there is no time to confirm another candidate, a confirmed one is recommended, even if another was faster in
        one run.
        """
        confirm_more = self._confirmed < _MAX_CONFIRMED and not self.clock.over(self.confirmation_seconds)
        return leader(self.log.records, self.judge, confirm_more=confirm_more)

    def least(self) -> Candidate | None:
        """Return the candidate with the smallest predicted need of the space; None if the time ended its search."""
        return self.predictor.least(lambda: not self.clock.over())

    def report_resumed(self) -> None:
        """Report the findings of earlier runs of the study to the listener."""
        records, leading = self.log.records, self.leader()
        if not records:
            return
        best = None
        if leading is not None:
            measurement = leading.confirmation or leading.measurement
            best = ProbeFinished(leading.number, leading.candidate, leading.purpose, measurement, best=True)
        vetoed = sum(not record.probed for record in records)
        self._listener(StudyResumed(self._counted_probes, vetoed, self.trials, best))

    @property
    def _ran(self) -> list[Measurement]:
        return [record.measurement for record in self.log.records if record.measurement.ok]

    @property
    def probe_seconds(self) -> float:
        """Mean seconds of the probes that fitted; 0 before the first."""
        return fmean(each.wall_seconds for each in self._ran) if self._ran else 0.0

    def has_time(self, reserve_seconds: float) -> bool:
        """Whether a further probe probably ends in time, and leaves ``reserve_seconds``."""
        walls = [record.measurement.wall_seconds for record in self.log.records if record.probed]
        usual = self.probe_seconds or (fmean(walls) if walls else 0.0)
        return not self.clock.over(reserve_seconds + usual)

    @property
    def confirmation_seconds(self) -> float:
        """Upper estimate, in seconds, of a winner's longer run; 0 before the first probe that fitted."""
        if not self.probe_seconds:
            return 0.0
        slowest = max(each.step_seconds or 0.0 for each in self._ran)
        return self.probe_seconds + max(self.effort.confirmation.max_seconds, WHOLE_STEPS * slowest)

    def _short_runs(self, winner: Record, max_runs: int) -> int:
        seconds = pair_seconds(winner, self.baseline)
        return short_runs(seconds, self.log.records, max_runs, self.clock.limit_seconds)

    def settling_seconds(self) -> float:
        """Return an estimate, in seconds, of confirmation and comparison; 0 without a leader."""
        first = self.leader()
        if first is None:
            return 0.0
        runs = self._short_runs(first, self.effort.comparisons)
        return self.confirmation_seconds + runs * pair_seconds(first, self.baseline)

    def refresh(self) -> None:
        """Read the records of the other workers, learn from them, and report them to the listener."""
        self.log.refresh()
        self._learn_new_records()

    def probe(self, candidate: Candidate, purpose: Purpose, reserve_seconds: float = 0.0) -> bool:
        """Probe a candidate and record the measurement, leaving ``reserve_seconds`` of the remaining time unused.

        Returns:
            Whether it was probed: False if another worker probes it, or probes the last one that the limit allows, or
            no time is left.
        """
        if self.clock.over(reserve_seconds):
            return False
        prediction = self.predictor.predict(candidate)
        number = self.log.claim(candidate, self.problem.identity(candidate), purpose, prediction, self._trials_left)
        self._learn_new_records()
        if number is None:
            return False
        self.vetoed_traces = 0
        # Timing ends early if a candidate is slower than the best so far.
        leading = self.leader() if purpose in (Purpose.SEARCH, Purpose.RECIPE) else None
        schedule = replace(self.effort.probe, rate_to_beat=leading.tokens_per_second if leading is not None else None)
        try:
            measurement = self._run(ProbeRun(number, candidate, purpose, schedule), reserve_seconds)
        except BaseException:
            # Raise the original error; other workers detect an abandoned trial by themselves.
            with suppress(AutotuneError):
                self.log.abandon(number, "the search was ended")
            raise
        record = Record(number, candidate, purpose, measurement)
        if self._was_cut_off(number, measurement, reserve_seconds):
            self.log.abandon(number, "the time limit ended it")
            self.cut_off.append(record)
            self.judge.exclude(candidate)
        elif (stored := self.log.finish(number, measurement)) is not None:
            self._own_numbers.add(stored.number)
        else:
            self._note(f"This worker's lease expired during probe {number}; another worker repeats it.")
        self._learn_new_records()
        self._report(record, purpose, measurement)
        return True

    def _learn_new_records(self) -> None:
        """Learn from new records in the study, of this worker and of others."""
        for record in self.log.take_new_records():
            self.judge.learn(record)
            if record.number in self._own_numbers:
                continue
            if record.probed:
                self._report(record, record.purpose, record.measurement)
            else:
                self._listener(CandidateVetoed(record.number, record.candidate, record.measurement.reason))
        self.judge.learn_later(self.log.records)
        self.judge.set_running_elsewhere([trial.candidate for trial in self.log.others_running])

    def run_again(self, number: int, turn: ComparisonTurn | None = None) -> None:
        """Run a trial's candidate again, longer or in a turn of a comparison, and record the measurement.

        Args:
            turn: the turn of the comparison; None for a longer run, to confirm it.
        """
        record = next(record for record in self.log.records if record.number == number)
        purpose, schedule = Purpose.CONFIRMATION, self.effort.confirmation
        if turn is not None:
            purpose, schedule = Purpose.COMPARISON, self.effort.comparison
        probed = record.measurement
        # The duration of the probe plus whole steps.
        expected_seconds = probed.wall_seconds + WHOLE_STEPS * (probed.step_seconds or 0.0)
        measurement = self._run(ProbeRun(number, record.candidate, purpose, schedule, turn, expected_seconds))
        if self.log.lapsed:
            self._note("This worker's lease expired while it confirmed a winner: it queues again.")
            raise TurnLost
        if not self._was_cut_off(number, measurement):
            if turn is None:
                self.log.confirm(number, measurement)
                self._confirmed += measurement.ok and record.candidate != self.baseline_candidate
            else:
                self.log.compare(turn, measurement)
            self.judge.learn_later(self.log.records)
        self._report(record, purpose, measurement)

    def next_turn(self, winner: Record) -> ComparisonTurn | None:
        """Return the next short run of a winner's comparison with the baseline, or None when it is complete."""
        wanted = wanted_runs(winner, self.effort.comparisons)
        return next_turn(winner, self.baseline, self._short_runs(winner, wanted))

    def _run(self, run: ProbeRun, reserve_seconds: float = 0.0) -> Measurement:
        self._own_numbers.add(run.number)
        self._listener(ProbeStarted(run.number, run.candidate, run.purpose, self.trials))
        return self._probe(run, self.clock.left(reserve_seconds))

    def _was_cut_off(self, number: int, measurement: Measurement, reserve_seconds: float = 0.0) -> bool:
        """Whether the search's time limit ended a probe, so that its result says nothing about the candidate."""
        cut_off = measurement.status is ProbeStatus.TIMEOUT and self.clock.over(reserve_seconds)
        if cut_off:
            self._note(f"The time limit ended the run of probe {number}: --resume repeats it.")
        return cut_off

    def veto(self, candidate: Candidate, purpose: Purpose, veto: Veto) -> None:
        """Record a candidate that is not worth a probe."""
        self.log.veto(candidate, purpose, veto.reason, veto.prediction)
        self._learn_new_records()

    def _report(self, record: Record, purpose: Purpose, measurement: Measurement) -> None:
        leading = self.leader()
        leads = measurement.ok and leading is not None and leading.number == record.number
        # A short run measures a known winner again, so it never counts as a new best.
        best = leads and purpose is not Purpose.COMPARISON
        self._listener(ProbeFinished(record.number, record.candidate, purpose, measurement, best))

    def _note(self, text: str) -> None:
        self._listener(Noted(text))
