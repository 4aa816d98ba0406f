"""Computes by how much a candidate missed the memory limit."""

from __future__ import annotations

from autotune.core.measurement import Measurement
from autotune.core.prediction import Prediction
from autotune.core.status import ProbeStatus

_UNKNOWN = 1.0
"""Violation of the memory constraint if the distance from fitting is not known: that of twice the limit."""

_SMALLEST = 0.01
"""Smallest violation of the memory constraint by a candidate that ran out of memory."""


def violation(measurement: Measurement, memory_limit_bytes: int, prediction: Prediction | None = None) -> float:
    """Return by what share of the limit a candidate missed it: at most 0 for one that fits, more for one that does not.

    Optuna's samplers treat any value above 0 as infeasible and rank infeasible candidates by it.

    Args:
        prediction: for a candidate that was vetoed because of its predicted need, that prediction.
    """
    if measurement.ok:
        used = measurement.need_bytes
        return min(0.0, used / memory_limit_bytes - 1.0) if used is not None else 0.0
    if measurement.status is ProbeStatus.VETOED and prediction is not None:
        return max(_SMALLEST, prediction.need_bytes / memory_limit_bytes - 1.0)
    oom = measurement.out_of_memory
    if oom is None or oom.wanted_bytes is None or oom.requested_bytes is None:
        return _UNKNOWN
    return max(_SMALLEST, oom.wanted_bytes / memory_limit_bytes - 1.0)
