"""Attributes of a trial: documents that are read back, and figures for those who look at the study."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from optuna.trial import FrozenTrial

from autotune.core.candidate import Candidate
from autotune.core.codec import decode, encode
from autotune.core.measurement import Measurement
from autotune.core.prediction import Prediction
from autotune.study.problem import Purpose, Record, ShortRun
from autotune.units import GIB

_CANDIDATE = "candidate"
_PURPOSE = "purpose"
_PREDICTION = "prediction"
MEASUREMENT = "measurement"
CONSTRAINT, LEGAL = "memory", "legal"
"""Names of the samplers' constraints; the second one of a baseline that fits and may not be recommended."""
RECOMMENDED = "recommended trial"
"""Attribute of a study for those who look at it: Optuna's best trial is that of the best probe."""

RATE = "tokens per second"
"""Name of the study's value."""
OUTCOME, REASON = "outcome", "reason"
HELD, RESERVED, PREDICTED = "memory held (GiB)", "reserved memory (GiB)", "predicted memory (GiB)"
PREDICTED_RATE = "predicted tokens per second"
"""Attributes of a trial for those who look at the study; nothing reads them. The documents above are what is read."""


def attributes_before_probe(candidate: Candidate, purpose: Purpose, prediction: Prediction | None) -> dict[str, Any]:
    """Return the attributes of a trial before its probe."""
    attributes = {_CANDIDATE: encode(candidate), _PURPOSE: purpose.value, _PREDICTION: encode(prediction)}
    if prediction is None:
        return attributes
    attributes[PREDICTED] = round(prediction.need_bytes / GIB, 4)
    rate = prediction.tokens_per_second
    return attributes if rate is None else {**attributes, PREDICTED_RATE: round(rate, 1)}


def attributes_after_probe(measurement: Measurement) -> dict[str, Any]:
    """Return the attributes of a trial after its probe: the document, and texts and numbers for a table of trials."""
    figures = {HELD: measurement.held_bytes, RESERVED: measurement.reserved_bytes}
    return {
        MEASUREMENT: encode(measurement),
        OUTCOME: measurement.status.value.replace("_", " "),
        **({REASON: measurement.reason} if measurement.reason else {}),
        **{name: round(size / GIB, 4) for name, size in figures.items() if size is not None},
    }


def candidate_of(trial: FrozenTrial) -> Candidate | None:
    """Return the candidate of a trial, or None if it has none: somebody else added it."""
    known = trial.user_attrs.get(_CANDIDATE)
    return None if known is None else decode(Candidate, known)


def purpose_of(trial: FrozenTrial) -> Purpose:
    """Return why a trial was started."""
    return Purpose(trial.user_attrs[_PURPOSE])


def prediction_of(trial: FrozenTrial) -> Prediction | None:
    """Return what was predicted of a trial's candidate, or None; a study of an early version has nothing of it."""
    known = trial.user_attrs.get(_PREDICTION)
    return None if known is None else decode(Prediction, known)


def record_of(trial: FrozenTrial, kept: Mapping[str, Any]) -> Record:
    """Return the record of a trial that has a measurement.

    Args:
        kept: the study's attributes, which hold what was measured after the trial.
    """
    number, attributes = trial.number, trial.user_attrs
    confirmation = kept.get(confirmation_key(number))
    keys = itertools.takewhile(kept.__contains__, (comparison_key(number, place) for place in itertools.count()))
    return Record(
        number=number,
        candidate=decode(Candidate, attributes[_CANDIDATE]),
        purpose=purpose_of(trial),
        measurement=decode(Measurement, attributes[MEASUREMENT]),
        confirmation=None if confirmation is None else decode(Measurement, confirmation),
        prediction=prediction_of(trial),
        comparison=tuple(decode(ShortRun, kept[key]) for key in keys),
    )


def confirmation_key(number: int) -> str:
    """Return the name of the study's attribute for a trial's longer run."""
    return f"autotune:confirmation:{number}"


def comparison_key(winner: int, place: int) -> str:
    """Return the name of the study's attribute for a short run in a winner's comparison."""
    return f"autotune:comparison:{winner}:{place}"
