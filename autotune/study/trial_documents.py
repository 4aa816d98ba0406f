"""Encodes trials as attributes of an Optuna study and decodes them; some attributes are for human readers only."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from autotune.core.candidate import Candidate
from autotune.core.files.codec import decode, encode
from autotune.core.measurement import Measurement
from autotune.core.prediction import Prediction
from autotune.core.status import ProbeStatus
from autotune.errors import AutotuneError
from autotune.study.problem import Purpose, Record, ShortRun
from autotune.units import GIB

_CANDIDATE = "candidate"
_PURPOSE = "purpose"
_PREDICTION = "prediction"
MEASUREMENT = "measurement"
CONSTRAINT, LEGAL = "memory", "legal"
"""Names of the samplers' constraints; a baseline that fits but may not be recommended violates the second."""
RECOMMENDED = "recommended trial"
"""Attribute of a study for human readers: the recommended trial; Optuna's best trial has the best probe."""

RATE = "tokens per second"
"""Name of the study's value."""
OUTCOME, REASON = "outcome", "reason"
HELD, RESERVED, PREDICTED = "memory used (GiB)", "reserved memory (GiB)", "predicted memory (GiB)"
PREDICTED_RATE = "predicted tokens per second"
"""Attributes of a trial for human readers; autotune does not read them."""

WORKER, PLAN = "autotune:worker", "autotune:plan"
"""System attributes of a trial: its worker, and a key that is equal for equal plans."""

WITHDRAWN, LOST = "autotune:withdrawn", "autotune:lost"
"""System attributes of a failed trial: another worker runs the candidate; the trial's worker is gone."""

MAX_DEATHS = 3
"""Lost workers after which their candidate is not probed again."""

_UNKNOWN_VIOLATION = 1.0
"""Violation of the memory constraint if the need is unknown: as for twice the limit."""

_MIN_VIOLATION = 0.01
"""Smallest violation of the memory constraint by a candidate that ran out of memory."""


@dataclass(frozen=True)
class Unfinished:
    """A candidate whose probe ended with its worker process.

    Attributes:
        deaths: number of workers lost while probing it: killed, or with a lapsed lease.
    """

    candidate: Candidate
    purpose: Purpose
    deaths: int


@dataclass(frozen=True)
class Running:
    """A trial that a worker is probing.

    Attributes:
        plan: key that is equal for candidates with the same plan.
    """

    number: int
    candidate: Candidate
    purpose: Purpose
    worker: str
    plan: str


def attributes_before_probe(candidate: Candidate, purpose: Purpose, prediction: Prediction | None) -> dict[str, Any]:
    """Return the attributes of a trial before its probe."""
    attributes = {_CANDIDATE: encode(candidate), _PURPOSE: purpose.value, _PREDICTION: encode(prediction)}
    if prediction is None:
        return attributes
    attributes[PREDICTED] = round(prediction.need_bytes / GIB, 4)
    rate = prediction.tokens_per_second
    return attributes if rate is None else {**attributes, PREDICTED_RATE: round(rate, 1)}


def attributes_after_probe(measurement: Measurement) -> dict[str, Any]:
    """Return the attributes of a trial after its probe: the measurement, and texts and numbers for human readers."""
    figures = {HELD: measurement.used_bytes, RESERVED: measurement.reserved_bytes}
    return {
        MEASUREMENT: encode(measurement),
        OUTCOME: measurement.status.value.replace("_", " "),
        **({REASON: measurement.reason} if measurement.reason else {}),
        **{name: round(size / GIB, 4) for name, size in figures.items() if size is not None},
    }


@contextmanager
def _readable(trial: FrozenTrial) -> Iterator[None]:
    """Name the trial whose attributes another program has changed.

    Raises:
        AutotuneError: an attribute is missing, or has another structure.
    """
    try:
        yield
    except (KeyError, ValueError) as error:
        what = f"has no {error}" if isinstance(error, KeyError) else f"has an attribute that cannot be read: {error}"
        hint = "Restore the study from a copy, or begin another one with another --output or --study."
        raise AutotuneError(f"Trial {trial.number} of the study {what}.", hint=hint) from error


def is_own(trial: FrozenTrial) -> bool:
    """Whether autotune added a trial."""
    return _CANDIDATE in trial.user_attrs


def candidate_of(trial: FrozenTrial) -> Candidate:
    """Return the candidate of a trial of autotune."""
    with _readable(trial):
        return decode(Candidate, trial.user_attrs[_CANDIDATE])


def purpose_of(trial: FrozenTrial) -> Purpose:
    """Return the purpose of a trial."""
    with _readable(trial):
        return Purpose(trial.user_attrs[_PURPOSE])


def prediction_of(trial: FrozenTrial) -> Prediction | None:
    """Return the prediction of a trial, or None; studies of early versions have none."""
    document = trial.user_attrs.get(_PREDICTION)
    with _readable(trial):
        return None if document is None else decode(Prediction, document)


def record_of(trial: FrozenTrial, study_attrs: Mapping[str, Any]) -> Record:
    """Return the record of a trial that has a measurement.

    Args:
        study_attrs: the study's attributes, which have the measurements after the probe.
    """
    number, attributes = trial.number, trial.user_attrs
    confirmation = study_attrs.get(confirmation_key(number))
    keys = itertools.takewhile(study_attrs.__contains__, (comparison_key(number, index) for index in itertools.count()))
    with _readable(trial):
        return Record(
            number=number,
            candidate=candidate_of(trial),
            purpose=purpose_of(trial),
            measurement=decode(Measurement, attributes[MEASUREMENT]),
            confirmation=None if confirmation is None else decode(Measurement, confirmation),
            prediction=prediction_of(trial),
            comparison=tuple(decode(ShortRun, study_attrs[key]) for key in keys),
        )


def confirmation_key(number: int) -> str:
    """Return the name of the study's attribute for a trial's longer run."""
    return f"autotune:confirmation:{number}"


def comparison_key(winner: int, index: int) -> str:
    """Return the name of the study's attribute for a short run in a winner's comparison."""
    return f"autotune:comparison:{winner}:{index}"


def running(trial: FrozenTrial) -> Running:
    """Return the probe of an open trial of autotune."""
    system = trial.system_attrs
    with _readable(trial):
        return Running(trial.number, candidate_of(trial), purpose_of(trial), system[WORKER], system[PLAN])


def unfinished_probes(trials: Sequence[FrozenTrial], known: Collection[Candidate]) -> list[Unfinished]:
    """Return the unfinished probes.

    Args:
        known: candidates with a record or a running trial.
    """
    purposes: dict[Candidate, Purpose] = {}
    deaths: Counter[Candidate] = Counter()
    for trial in trials:
        if trial.state is not TrialState.FAIL or WITHDRAWN in trial.system_attrs or not is_own(trial):
            continue
        candidate = candidate_of(trial)
        if candidate not in known:
            purposes[candidate] = purpose_of(trial)
            deaths[candidate] += LOST in trial.system_attrs
    return [Unfinished(candidate, purpose, deaths[candidate]) for candidate, purpose in purposes.items()]


def violation(measurement: Measurement, memory_limit_bytes: int, prediction: Prediction | None = None) -> float:
    """Return need / limit - 1: the violation of the memory constraint, at most 0 for a candidate that fits.

    Optuna's samplers treat any value above 0 as infeasible and rank infeasible candidates by it.

    Args:
        prediction: the prediction that vetoed the candidate; else None.
    """
    if measurement.ok:
        used = measurement.need_bytes
        return min(0.0, used / memory_limit_bytes - 1.0) if used is not None else 0.0
    if measurement.status is ProbeStatus.VETOED and prediction is not None:
        return max(_MIN_VIOLATION, prediction.need_bytes / memory_limit_bytes - 1.0)
    oom = measurement.out_of_memory
    if oom is None or oom.attempted_bytes is None or oom.requested_bytes is None:
        return _UNKNOWN_VIOLATION
    return max(_MIN_VIOLATION, oom.attempted_bytes / memory_limit_bytes - 1.0)
