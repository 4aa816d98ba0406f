"""Claims candidates for this worker, writes the trials of a study to Optuna, and reads those of all workers back."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState

from autotune.core.candidate import Candidate
from autotune.core.codec import encode
from autotune.core.measurement import Measurement
from autotune.core.prediction import Prediction
from autotune.core.status import ProbeStatus
from autotune.study import trial_documents as documents
from autotune.study.problem import ComparisonTurn, Problem, Purpose, Record, ShortRun
from autotune.study.roster import Roster
from autotune.study.storage import OpenStudy
from autotune.study.trial_documents import Running, Unfinished

_SHOWN_WORKER = "worker"


class TrialLog:
    """The records of a study; each method returns after its data is stored.

    Attributes:
        memory_limit_bytes: memory that a candidate may need.
        space: the sampler's search space: the knobs that have more than one choice.
        unfinished: probes that were started and not finished, and that nobody repeats at this moment.
        running: trials of all workers that are alive, this one included.
        others_running: those of the others.
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
        self._news: dict[int, Record] = {}
        self.refresh()

    @property
    def records(self) -> list[Record]:
        """All records in the order of their numbers."""
        return [self._records[number] for number in sorted(self._records)]

    @property
    def lapsed(self) -> bool:
        """Whether this worker's lease expired since it queued to confirm a winner."""
        return self._roster.lapsed

    def news(self) -> list[Record]:
        """Return the records that are new since the last call, of all workers, in the order of their numbers."""
        found = [self._news[number] for number in sorted(self._news)]
        self._news.clear()
        return found

    def refresh(self) -> None:
        """Read what all workers have stored, and close the trials of those that are gone."""
        kept = self._opened.study.user_attrs
        trials = self._opened.study.get_trials(deepcopy=False)
        # Read after the trials: whoever has claimed one of them signed in before.
        alive = {self._roster.me.key, *(worker.key for worker in self._roster.others())}
        begun = [trial for trial in trials if not trial.state.is_finished()]
        gone = [trial.number for trial in begun if trial.system_attrs.get(documents.WORKER) not in alive]
        if gone:
            for number in gone:
                self._close_lost(number, kept)
            trials = self._opened.study.get_trials(deepcopy=False)
        for trial in trials:
            if trial.state in (TrialState.COMPLETE, TrialState.PRUNED) and documents.MEASUREMENT in trial.user_attrs:
                self._keep(trial, kept)
        begun = [trial for trial in trials if not trial.state.is_finished()]
        self.running = [found for trial in begun for found in documents.running(trial)]
        self.others_running = [trial for trial in self.running if trial.worker != self._roster.me.key]
        probed = {record.candidate for record in self._records.values()}
        self.unfinished = documents.cut_off(trials, probed | {trial.candidate for trial in self.running})

    def claim(
        self, candidate: Candidate, plan: str, purpose: Purpose, prediction: Prediction | None, most: int
    ) -> int | None:
        """Create the running trial of a probe, and return its number; None if it is not this worker's to run.

        The lowest number wins: a storage hands out numbers one after another, and whoever comes later sees what came
        before when it reads the study again.

        Args:
            plan: equal for candidates with the same plan, of which only one is probed.
            most: trials that may be probed in all, audits and others counted apart.
        """
        claim = self._create(candidate, purpose, prediction, plan)
        self.refresh()
        # A call that failed and was repeated may have created several.
        mine = sorted(trial.number for trial in self.running if trial.claim == claim)
        for number in mine[1:]:
            self.abandon(number, "it was stored twice", documents.WITHDRAWN)
        if not mine:
            return None
        before = [trial for trial in self.running if trial.number < mine[0]]
        probed = [record for record in self._records.values() if record.probed]
        purposes = [*(trial.purpose for trial in before), *(record.purpose for record in probed)]
        used = sum((known is Purpose.AUDIT) == (purpose is Purpose.AUDIT) for known in purposes)
        if plan in self._probed_plans or any(trial.plan == plan for trial in before):
            lost = "another worker probes this candidate"
        elif used >= most:
            lost = "other workers probe the last candidates"
        else:
            return mine[0]
        self.abandon(mine[0], lost, documents.WITHDRAWN)
        return None

    @property
    def _probed_plans(self) -> set[str]:
        return {self._plans[record.number] for record in self._records.values() if record.probed}

    def finish(self, number: int, measurement: Measurement) -> Record | None:
        """Store a probe's measurement and pass it to the samplers.

        If this worker's lease expired meanwhile, it is stored as another trial. None, if another worker has repeated
        the probe by then, or repeats it.
        """
        trial = self._trial(number)
        try:
            for name, figure in documents.attributes_after_probe(measurement).items():
                trial.set_user_attr(name, figure)
        except UpdateFinishedTrialError:
            return self._store_again(self._frozen(number), measurement)
        self._end(trial, documents.record_of(self._frozen(number), {}))
        self.refresh()
        return self._records.get(number)

    def _store_again(self, lost: FrozenTrial, measurement: Measurement) -> Record | None:
        self.refresh()
        if lost.number in self._records:
            return self._records[lost.number]
        plan, candidate = lost.system_attrs[documents.PLAN], documents.candidate_of(lost)
        if candidate is None or plan in self._probed_plans or any(trial.plan == plan for trial in self.running):
            return None
        self._create(candidate, documents.purpose_of(lost), documents.prediction_of(lost), plan, measurement)
        self.refresh()
        return self._records[max(number for number, known in self._plans.items() if known == plan)]

    def abandon(self, number: int, reason: str, mark: str | None = None) -> None:
        """Close a trial whose probe did not end, so that it is repeated.

        Args:
            mark: the system attribute that says how it comes that it did not end; None: it has none.
        """
        trial, storage = self._id(number), self._opened.storage
        with suppress(UpdateFinishedTrialError):
            if mark is not None:
                storage.set_trial_system_attr(trial, mark, reason)
            storage.set_trial_user_attr(trial, documents.OUTCOME, "not finished")
            storage.set_trial_user_attr(trial, documents.REASON, reason)
            storage.set_trial_state_values(trial, TrialState.FAIL)

    def veto(self, candidate: Candidate, purpose: Purpose, reason: str, prediction: Prediction | None = None) -> None:
        """Store a candidate that is decided without a probe, and pass it to the samplers.

        Args:
            prediction: the prediction that decided, or None if another reason did.
        """
        self._create(candidate, purpose, prediction, "", Measurement(ProbeStatus.VETOED, reason))
        self.refresh()

    def confirm(self, number: int, measurement: Measurement) -> None:
        """Store the measurement of the longer run of a trial's candidate."""
        # Optuna accepts no attributes for a finished trial, so the study stores them.
        self._opened.study.set_user_attr(documents.confirmation_key(number), encode(measurement))
        self._records[number] = replace(self._records[number], confirmation=measurement)

    def compare(self, turn: ComparisonTurn, measurement: Measurement) -> None:
        """Store the measurement of a short run, after those of the same winner that are stored already."""
        winner, run = self._records[turn.winner], ShortRun(turn.number, measurement)
        self._opened.study.set_user_attr(documents.comparison_key(turn.winner, len(winner.comparison)), encode(run))
        self._records[turn.winner] = replace(winner, comparison=(*winner.comparison, run))

    def _keep(self, trial: FrozenTrial, kept: Mapping[str, Any]) -> None:
        known = self._records.get(trial.number)
        if known is None:
            self._news[trial.number] = self._records[trial.number] = documents.record_of(trial, kept)
            self._plans[trial.number] = str(trial.system_attrs.get(documents.PLAN, ""))
        elif documents.confirmation_key(trial.number) in kept or documents.comparison_key(trial.number, 0) in kept:
            self._records[trial.number] = documents.record_of(trial, kept)

    def _create(
        self,
        candidate: Candidate,
        purpose: Purpose,
        prediction: Prediction | None,
        plan: str,
        measurement: Measurement | None = None,
    ) -> str:
        """Add a trial, which runs if it has no measurement, and return what names this attempt to create it."""
        # A trial is added in one transaction, so that it never lacks its candidate or its worker.
        # A baseline or recipe may have choices outside of the space: the sampler then cannot use this trial.
        inside = all(candidate[knob] in self._problem.choices[knob] for knob in self.space)
        state, value, shown, constraints = TrialState.RUNNING, None, {}, None
        if measurement is not None:
            state, value = _end_of(measurement)
            shown = documents.attributes_after_probe(measurement)
            constraints = self._constraints(candidate, measurement, prediction)
        worker, claim = self._roster.me, uuid.uuid4().hex
        trial = optuna.trial.create_trial(
            state=state,
            value=value,
            params={knob: candidate[knob] for knob in self.space} if inside else {},
            distributions=self.space if inside else {},
            user_attrs={
                **documents.attributes_before_probe(candidate, purpose, prediction),
                _SHOWN_WORKER: worker.name,
                **shown,
            },
            system_attrs={documents.WORKER: worker.key, documents.PLAN: plan, documents.CLAIM: claim},
            constraints=constraints,
        )
        self._opened.study.add_trial(trial)
        return claim

    def _constraints(
        self, candidate: Candidate, measurement: Measurement, prediction: Prediction | None
    ) -> dict[str, float]:
        """Return the violations of the constraints of the samplers and of Optuna's best trial."""
        found = {documents.CONSTRAINT: documents.violation(measurement, self.memory_limit_bytes, prediction)}
        if measurement.ok and self._problem.illegal(candidate) is not None:
            found[documents.LEGAL] = 1.0
        return found

    def _end(self, trial: optuna.Trial, record: Record) -> None:
        """Pass a measurement to the samplers, unless another worker has done so for this trial."""
        measurement = record.measurement
        state, value = _end_of(measurement)
        with suppress(UpdateFinishedTrialError):
            for name, missed in self._constraints(record.candidate, measurement, record.prediction).items():
                trial.set_constraint(name, missed)
            values = None if value is None else [value]
            self._opened.storage.set_trial_state_values(self._id(trial.number), state, values)

    def _close_lost(self, number: int, kept: Mapping[str, Any]) -> None:
        """Close the trial of a worker that is gone: by its measurement, if that was stored, else as failed."""
        # The worker may have stored a measurement, or ended the trial, after it was read as open.
        trial = self._frozen(number)
        if documents.MEASUREMENT not in trial.user_attrs:
            self.abandon(number, "the worker that probed it is gone", documents.LOST)
        elif not trial.state.is_finished():
            self._end(self._trial(number), documents.record_of(trial, kept))

    def _id(self, number: int) -> int:
        return self._opened.storage.get_trial_id_from_study_id_trial_number(self._opened.study_id, number)

    def _trial(self, number: int) -> optuna.Trial:
        return optuna.trial.Trial(self._opened.study, self._id(number))

    def _frozen(self, number: int) -> FrozenTrial:
        return self._opened.storage.get_trial(self._id(number))


def _end_of(measurement: Measurement) -> tuple[TrialState, float | None]:
    """Return state and value of a trial that has ended.

    TPE ranks infeasible trials by their violation, independent of their value, so a pruned trial, which needs no
    made-up rate, is as informative to it as a complete one. It never sees failed trials.
    """
    if measurement.ok and measurement.tokens_per_second is not None:
        return TrialState.COMPLETE, measurement.tokens_per_second
    return TrialState.PRUNED, None
