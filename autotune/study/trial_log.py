"""Claims candidates for this worker, and reads and writes the trials of the shared Optuna study."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState

from autotune.core.candidate import Candidate
from autotune.core.files.codec import encode
from autotune.core.measurement import Measurement
from autotune.core.prediction import Prediction
from autotune.core.status import ProbeStatus
from autotune.study import trial_documents as documents
from autotune.study.problem import ComparisonTurn, Problem, Purpose, Record, ShortRun
from autotune.study.roster import Roster
from autotune.study.storage import OpenStudy
from autotune.study.trial_documents import Running, Unfinished

_WORKER_NAME = "worker"


class TrialLog:
    """The records of a study; each method returns after its data is stored.

    Attributes:
        memory_limit_bytes: maximum memory need of a candidate.
        space: the sampler's search space: the knobs with more than one choice.
        unfinished: probes that did not finish, and that no worker is repeating.
        running: running trials of all live workers, including this one.
        others_running: running trials of the other workers.
    """

    def __init__(
        self,
        opened: OpenStudy,
        roster: Roster,
        problem: Problem,
        memory_limit_bytes: int,
    ) -> None:
        self.space: dict[str, BaseDistribution] = {
            knob: CategoricalDistribution(options) for knob, options in problem.choices.items() if len(options) > 1
        }
        self.memory_limit_bytes = memory_limit_bytes
        self.unfinished: list[Unfinished] = []
        self.running: list[Running] = []
        self.others_running: list[Running] = []
        self._opened = opened
        self._roster = roster
        self._problem = problem
        self._records: dict[int, Record] = {}
        self._plans: dict[int, str] = {}
        self._new_records: dict[int, Record] = {}
        self.refresh()

    @property
    def records(self) -> list[Record]:
        """All records in the order of their numbers."""
        return [self._records[number] for number in sorted(self._records)]

    @property
    def lapsed(self) -> bool:
        """Whether this worker's lease has lapsed since it queued to confirm a winner."""
        return self._roster.lapsed

    def take_new_records(self) -> list[Record]:
        """Return the records of all workers since the last call, in the order of their numbers."""
        records = [self._new_records[number] for number in sorted(self._new_records)]
        self._new_records.clear()
        return records

    def refresh(self) -> None:
        """Read the trials of all workers, and close those of lost workers."""
        study_attrs = self._opened.study.user_attrs
        trials = self._own_trials()
        # Read after the trials: a worker signs in before it claims a trial.
        alive = {self._roster.me.key, *(worker.key for worker in self._roster.others())}
        open_trials = [trial for trial in trials if not trial.state.is_finished()]
        lost = [trial.number for trial in open_trials if trial.system_attrs.get(documents.WORKER) not in alive]
        if lost:
            for number in lost:
                self._close_lost(number, study_attrs)
            trials = self._own_trials()
        for trial in trials:
            if trial.state in (TrialState.COMPLETE, TrialState.PRUNED) and documents.MEASUREMENT in trial.user_attrs:
                self._add_record(trial, study_attrs)
        open_trials = [trial for trial in trials if not trial.state.is_finished()]
        self.running = [documents.running(trial) for trial in open_trials]
        self.others_running = [trial for trial in self.running if trial.worker != self._roster.me.key]
        probed = {record.candidate for record in self._records.values()}
        self.unfinished = documents.unfinished_probes(trials, probed | {trial.candidate for trial in self.running})

    def _own_trials(self) -> list[FrozenTrial]:
        """Return the trials of all workers; a user may add trials to the study, which stay as they are."""
        return [trial for trial in self._opened.study.get_trials(deepcopy=False) if documents.is_own(trial)]

    def claim(
        self, candidate: Candidate, plan: str, purpose: Purpose, prediction: Prediction | None, max_probes: int
    ) -> int | None:
        """Create a running trial and return its number; None if another worker runs it, or the limit is reached.

        Of concurrent claims, the lowest number wins: a storage numbers trials in order, and each worker reads the study
        again after its claim.

        Args:
            plan: key that is equal for candidates with the same plan, of which only one is probed.
            max_probes: maximum number of probes.
        """
        self._create(candidate, purpose, prediction, plan)
        self.refresh()
        # A repeated call may have created several trials.
        me = self._roster.me.key
        own_numbers = sorted(trial.number for trial in self.running if (trial.worker, trial.plan) == (me, plan))
        for number in own_numbers[1:]:
            self.abandon(number, "it was stored twice", documents.WITHDRAWN)
        if not own_numbers:
            return None
        earlier = [trial for trial in self.running if trial.number < own_numbers[0]]
        used = len(earlier) + sum(record.probed for record in self._records.values())
        if plan in self._probed_plans or any(trial.plan == plan for trial in earlier):
            reason = "another worker probes this candidate"
        elif used >= max_probes:
            reason = "other workers probe the last candidates"
        else:
            return own_numbers[0]
        self.abandon(own_numbers[0], reason, documents.WITHDRAWN)
        return None

    @property
    def _probed_plans(self) -> set[str]:
        return {self._plans[record.number] for record in self._records.values() if record.probed}

    def finish(self, number: int, measurement: Measurement) -> Record | None:
        """Store a probe's measurement, pass it to the samplers, and return its record.

        If this worker's lease has expired, the measurement becomes another trial, unless another worker has repeated
        the probe or is repeating it: then the record is None.
        """
        trial = self._trial(number)
        try:
            for name, figure in documents.attributes_after_probe(measurement).items():
                trial.set_user_attr(name, figure)
        except UpdateFinishedTrialError:
            return self._store_in_new_trial(self._frozen(number), measurement)
        self._tell(trial, documents.record_of(self._frozen(number), {}))
        self.refresh()
        return self._records.get(number)

    def _store_in_new_trial(self, lost: FrozenTrial, measurement: Measurement) -> Record | None:
        self.refresh()
        if lost.number in self._records:
            return self._records[lost.number]
        plan, candidate = lost.system_attrs[documents.PLAN], documents.candidate_of(lost)
        if plan in self._probed_plans or any(trial.plan == plan for trial in self.running):
            return None
        self._create(candidate, documents.purpose_of(lost), documents.prediction_of(lost), plan, measurement)
        self.refresh()
        return self._records[max(number for number, each in self._plans.items() if each == plan)]

    def abandon(self, number: int, reason: str, mark: str | None = None) -> None:
        """Close a trial whose probe did not end, so that it is repeated.

        Args:
            mark: system attribute for the reason, such as ``LOST``; None: none.
        """
        trial, storage = self._id(number), self._opened.storage
        with suppress(UpdateFinishedTrialError):
            if mark is not None:
                storage.set_trial_system_attr(trial, mark, reason)
            storage.set_trial_user_attr(trial, documents.OUTCOME, "not finished")
            storage.set_trial_user_attr(trial, documents.REASON, reason)
            storage.set_trial_state_values(trial, TrialState.FAIL)

    def veto(self, candidate: Candidate, purpose: Purpose, reason: str, prediction: Prediction | None = None) -> None:
        """Store a vetoed candidate, and pass it to the samplers.

        Args:
            prediction: the prediction that vetoed the candidate; None for another reason.
        """
        self._create(candidate, purpose, prediction, "", Measurement(ProbeStatus.VETOED, reason))
        self.refresh()

    def confirm(self, number: int, measurement: Measurement) -> None:
        """Store the measurement of a trial's longer run."""
        # Optuna accepts no attributes for a finished trial, so the study stores them.
        self._opened.study.set_user_attr(documents.confirmation_key(number), encode(measurement))
        self._records[number] = replace(self._records[number], confirmation=measurement)

    def compare(self, turn: ComparisonTurn, measurement: Measurement) -> None:
        """Append the measurement of a short run to the winner's comparison."""
        winner, run = self._records[turn.winner], ShortRun(turn.number, measurement)
        self._opened.study.set_user_attr(documents.comparison_key(turn.winner, len(winner.comparison)), encode(run))
        self._records[turn.winner] = replace(winner, comparison=(*winner.comparison, run))

    def _add_record(self, trial: FrozenTrial, attrs: Mapping[str, Any]) -> None:
        existing = self._records.get(trial.number)
        if existing is None:
            self._new_records[trial.number] = self._records[trial.number] = documents.record_of(trial, attrs)
            self._plans[trial.number] = str(trial.system_attrs.get(documents.PLAN, ""))
        elif documents.confirmation_key(trial.number) in attrs or documents.comparison_key(trial.number, 0) in attrs:
            self._records[trial.number] = documents.record_of(trial, attrs)

    def _create(
        self,
        candidate: Candidate,
        purpose: Purpose,
        prediction: Prediction | None,
        plan: str,
        measurement: Measurement | None = None,
    ) -> None:
        """Add a trial, which is running if it has no measurement."""
        # A trial is added in one transaction, so that it never lacks its candidate or its worker.
        # A baseline or recipe may have choices outside of the space: the sampler then cannot use this trial.
        is_in_space = all(candidate[knob] in self._problem.choices[knob] for knob in self.space)
        state, value, attributes, constraints = TrialState.RUNNING, None, {}, None
        if measurement is not None:
            state, value = _final_state(measurement)
            attributes = documents.attributes_after_probe(measurement)
            constraints = self._constraints(candidate, measurement, prediction)
        worker = self._roster.me
        trial = optuna.trial.create_trial(
            state=state,
            value=value,
            params={knob: candidate[knob] for knob in self.space} if is_in_space else {},
            distributions=self.space if is_in_space else {},
            user_attrs={
                **documents.attributes_before_probe(candidate, purpose, prediction),
                _WORKER_NAME: worker.name,
                **attributes,
            },
            system_attrs={documents.WORKER: worker.key, documents.PLAN: plan},
            constraints=constraints,
        )
        self._opened.study.add_trial(trial)

    def _constraints(
        self, candidate: Candidate, measurement: Measurement, prediction: Prediction | None
    ) -> dict[str, float]:
        """Return the violations of the constraints, for the samplers and Optuna's best trial."""
        violations = {documents.CONSTRAINT: documents.violation(measurement, self.memory_limit_bytes, prediction)}
        if measurement.ok and self._problem.illegal(candidate) is not None:
            violations[documents.LEGAL] = 1.0
        return violations

    def _tell(self, trial: optuna.Trial, record: Record) -> None:
        """Tell a measurement to the samplers, unless another worker has finished the trial."""
        measurement = record.measurement
        state, value = _final_state(measurement)
        with suppress(UpdateFinishedTrialError):
            for name, violation in self._constraints(record.candidate, measurement, record.prediction).items():
                trial.set_constraint(name, violation)
            values = None if value is None else [value]
            self._opened.storage.set_trial_state_values(self._id(trial.number), state, values)

    def _close_lost(self, number: int, study_attrs: Mapping[str, Any]) -> None:
        """Close the trial of a lost worker: with its measurement if that was stored, else as failed."""
        # The worker may have stored a measurement, or finished the trial, since the last read.
        trial = self._frozen(number)
        if documents.MEASUREMENT not in trial.user_attrs:
            self.abandon(number, "the worker that probed it is gone", documents.LOST)
        elif not trial.state.is_finished():
            self._tell(self._trial(number), documents.record_of(trial, study_attrs))

    def _id(self, number: int) -> int:
        return self._opened.storage.get_trial_id_from_study_id_trial_number(self._opened.study_id, number)

    def _trial(self, number: int) -> optuna.Trial:
        return optuna.trial.Trial(self._opened.study, self._id(number))

    def _frozen(self, number: int) -> FrozenTrial:
        return self._opened.storage.get_trial(self._id(number))


def _final_state(measurement: Measurement) -> tuple[TrialState, float | None]:
    """Return the state and the value of a finished trial.

    TPE ranks infeasible trials by their violation, independent of their value, so a pruned trial without a value is as
    informative to it as a complete one. It ignores failed trials.
    """
    if measurement.ok and measurement.tokens_per_second is not None:
        return TrialState.COMPLETE, measurement.tokens_per_second
    return TrialState.PRUNED, None
