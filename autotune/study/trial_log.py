"""Writes the trials of a study to Optuna and reads them back as records."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import TrialState

from autotune.core.candidate import Candidate, Choice
from autotune.core.codec import decode, encode
from autotune.core.measurement import Measurement
from autotune.core.prediction import Prediction
from autotune.core.status import ProbeStatus
from autotune.study.problem import Purpose, Record, ShortRun, Turn
from autotune.study.violation import violation
from autotune.units import GIB

_CANDIDATE = "candidate"
_PURPOSE = "purpose"
_MEASUREMENT = "measurement"
_PREDICTION = "prediction"
_CONFIRMATION = "autotune:confirmation:"
_COMPARISON = "autotune:comparison:"
_CONSTRAINT = "memory"

RATE = "tokens per second"
"""Name of the study's value."""
OUTCOME, REASON = "outcome", "reason"
PEAK, RESERVED, PREDICTED = "peak memory (GiB)", "reserved memory (GiB)", "predicted memory (GiB)"
PREDICTED_RATE = "predicted tokens per second"
"""Attributes of a trial for those who look at the study; nothing reads them. The documents above are what is read."""


@dataclass(frozen=True)
class Unfinished:
    """A candidate whose probe was cut off by the end of an earlier run."""

    candidate: Candidate
    purpose: Purpose


class TrialLog:
    """The records of a study; each method returns after its data is stored.

    Attributes:
        memory_limit_bytes: memory that a candidate may need.
        space: the sampler's search space: the knobs that have more than one choice.
        unfinished: probes that earlier runs started and did not finish; their trials are closed as failed.
    """

    def __init__(self, study: optuna.Study, choices: Mapping[str, tuple[Choice, ...]], memory_limit_bytes: int) -> None:
        self.space: dict[str, BaseDistribution] = {
            knob: CategoricalDistribution(options) for knob, options in choices.items() if len(options) > 1
        }
        self._study = study
        self._choices = choices
        self.memory_limit_bytes = memory_limit_bytes
        self._records: dict[int, Record] = {}
        for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED)):
            self._keep(trial.number, trial.user_attrs)
        self.unfinished = self._close_left_over()

    @property
    def records(self) -> list[Record]:
        """All records in the order of their numbers."""
        return [self._records[number] for number in sorted(self._records)]

    def start(self, candidate: Candidate, purpose: Purpose, prediction: Prediction | None = None) -> optuna.Trial:
        """Create the running trial of a probe."""
        return self._start(candidate, purpose, prediction, {})

    def finish(self, trial: optuna.Trial, measurement: Measurement) -> Record:
        """Store a probe's measurement and pass it to the sampler."""
        trial.set_user_attr(_MEASUREMENT, encode(measurement))
        for name, figure in _shown(measurement).items():
            if name not in trial.user_attrs:
                trial.set_user_attr(name, figure)
        record = self._keep(trial.number, trial.user_attrs)
        self._tell(trial, record)
        return record

    def veto(self, candidate: Candidate, purpose: Purpose, reason: str, prediction: Prediction | None = None) -> Record:
        """Store a candidate that is decided without a probe, and pass it to the sampler.

        Args:
            prediction: the prediction that decided, or None if another reason did.
        """
        vetoed = Measurement(status=ProbeStatus.VETOED, reason=reason)
        return self.finish(self._start(candidate, purpose, prediction, _shown(vetoed)), vetoed)

    def confirm(self, number: int, measurement: Measurement) -> Record:
        """Store the measurement of the longer run of a trial's candidate."""
        # Optuna accepts no attributes for a finished trial, so the study stores them.
        self._study.set_user_attr(f"{_CONFIRMATION}{number}", encode(measurement))
        self._records[number] = replace(self._records[number], confirmation=measurement)
        return self._records[number]

    def compare(self, turn: Turn, measurement: Measurement) -> Record:
        """Store the measurement of a short run, after those of the same winner that are stored already."""
        winner, run = self._records[turn.winner], ShortRun(turn.number, measurement)
        self._study.set_user_attr(_comparison_key(turn.winner, len(winner.comparison)), encode(run))
        self._records[turn.winner] = replace(winner, comparison=(*winner.comparison, run))
        return self._records[turn.winner]

    def _close_left_over(self) -> list[Unfinished]:
        for _ in self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
            self._study.ask()
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            self._study.tell(trial.number, state=TrialState.FAIL)
        failed = self._study.get_trials(deepcopy=False, states=(TrialState.FAIL,))
        left_over = {
            decode(Candidate, trial.user_attrs[_CANDIDATE]): Purpose(trial.user_attrs[_PURPOSE]) for trial in failed
        }
        for record in self._records.values():
            left_over.pop(record.candidate, None)
        return [Unfinished(candidate, purpose) for candidate, purpose in left_over.items()]

    def _start(
        self, candidate: Candidate, purpose: Purpose, prediction: Prediction | None, shown: Mapping[str, object]
    ) -> optuna.Trial:
        # A waiting trial is added in one transaction, so that a trial never lacks its candidate.
        self._study.add_trial(self._template(candidate, purpose, TrialState.WAITING, prediction, shown))
        return self._study.ask()

    def _template(
        self,
        candidate: Candidate,
        purpose: Purpose,
        state: TrialState,
        prediction: Prediction | None,
        shown: Mapping[str, object],
    ) -> optuna.trial.FrozenTrial:
        # A baseline or recipe may have choices outside of the space: the sampler then cannot use this trial.
        inside = all(candidate[knob] in self._choices[knob] for knob in self.space)
        return optuna.trial.create_trial(
            state=state,
            params={knob: candidate[knob] for knob in self.space} if inside else {},
            distributions=self.space if inside else {},
            user_attrs={
                _CANDIDATE: encode(candidate),
                _PURPOSE: purpose.value,
                _PREDICTION: encode(prediction),
                **_shown_prediction(prediction),
                **shown,
            },
        )

    def _tell(self, trial: optuna.Trial, record: Record) -> None:
        measurement = record.measurement
        trial.set_constraint(_CONSTRAINT, violation(measurement, self.memory_limit_bytes, record.prediction))
        if measurement.ok:
            self._study.tell(trial, measurement.tokens_per_second)
        else:
            # TPE ranks infeasible trials by their violation, independent of their value, so a pruned trial, which needs
            # no made-up rate, is as informative to it as a complete one. It never sees failed trials.
            self._study.tell(trial, state=TrialState.PRUNED)

    def _keep(self, number: int, attributes: Mapping[str, Any]) -> Record:
        kept = self._study.user_attrs
        confirmation = kept.get(f"{_CONFIRMATION}{number}")
        keys = itertools.takewhile(kept.__contains__, (_comparison_key(number, place) for place in itertools.count()))
        # A study of an earlier version has none.
        prediction = attributes.get(_PREDICTION)
        self._records[number] = Record(
            number=number,
            candidate=decode(Candidate, attributes[_CANDIDATE]),
            purpose=Purpose(attributes[_PURPOSE]),
            measurement=decode(Measurement, attributes[_MEASUREMENT]),
            confirmation=None if confirmation is None else decode(Measurement, confirmation),
            prediction=None if prediction is None else decode(Prediction, prediction),
            comparison=tuple(decode(ShortRun, kept[key]) for key in keys),
        )
        return self._records[number]


def _shown(measurement: Measurement) -> Mapping[str, object]:
    """Return what a table of trials shows of a measurement, such as optuna-dashboard's: texts and numbers."""
    figures = {PEAK: measurement.peak_bytes, RESERVED: measurement.reserved_bytes}
    return {
        OUTCOME: measurement.status.value.replace("_", " "),
        **({REASON: measurement.reason} if measurement.reason else {}),
        **{name: round(size / GIB, 4) for name, size in figures.items() if size is not None},
    }


def _shown_prediction(prediction: Prediction | None) -> Mapping[str, object]:
    if prediction is None:
        return {}
    rate = prediction.tokens_per_second
    return {
        PREDICTED: round(prediction.need_bytes / GIB, 4),
        **({PREDICTED_RATE: round(rate, 1)} if rate is not None else {}),
    }


def _comparison_key(winner: int, place: int) -> str:
    return f"{_COMPARISON}{winner}:{place}"
