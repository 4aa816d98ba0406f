"""By how much a candidate missed the memory limit."""

from __future__ import annotations

from autotune.core.measurement import Measurement
from autotune.core.prediction import Prediction
from autotune.core.status import ProbeStatus

_UNKNOWN = 1.0
"""Of the memory constraint, where it is not known how far a candidate is from fitting: as far as twice the limit."""

_SMALLEST = 0.01
"""Of the memory constraint by a candidate that ran out of memory, however little it asked for."""


def violation(measurement: Measurement, memory_limit_bytes: int, prediction: Prediction | None = None) -> float:
    """Return by what share of the limit a candidate missed it: at most 0 for one that fits, more for one that does not.

    Optuna's samplers take any value above 0 as infeasible and rank the infeasible ones by it.

    Args:
        prediction: what a vetoed candidate was vetoed for, where that was a prediction of its need.
    """
    if measurement.ok:
        used = measurement.reserved_bytes or measurement.peak_bytes
        return min(0.0, used / memory_limit_bytes - 1.0) if used is not None else 0.0
    if measurement.status is ProbeStatus.VETOED and prediction is not None:
        return max(_SMALLEST, prediction.need_bytes / memory_limit_bytes - 1.0)
    oom = measurement.out_of_memory
    if oom is None or oom.held_bytes is None or oom.requested_bytes is None:
        return _UNKNOWN
    return max(_SMALLEST, (oom.held_bytes + oom.requested_bytes) / memory_limit_bytes - 1.0)
