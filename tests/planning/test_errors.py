"""A planned need: its error if a part depends on the values of real data, and its parts on a small device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autotune.core.program import MICRO_BATCH
from autotune.core.step_time import StepTime
from autotune.core.timeline import Occurrence, Part
from autotune.inspection.gpus import find_gpu
from autotune.planning.extrapolation.forecast import TRACED_ERROR, Aligned, Forecast, memory_estimate
from autotune.units import GIB


def of_one_moment(levels: dict[str, int]) -> Aligned:
    """Return a stretch with one moment, with these bytes by category."""
    figures = np.array([[float(size)] for size in levels.values()])
    return Aligned(("a moment",), list(levels), figures, figures, (0,), 0)


def test_the_error_of_products_in_8_bits_reaches_from_no_column_with_outliers_to_all() -> None:
    gpu, backward = find_gpu("H200"), (Part(MICRO_BATCH, Occurrence.FIRST), True)
    needs = []
    for outlier_bytes in (0, 15 * GIB, 30 * GIB):
        stretch = of_one_moment({"activation": 16 * GIB, "outlier": outlier_bytes})
        forecast = Forecast({backward: stretch}, 0.0, 0, 0, 0, 0, 0, {})
        needs.append(memory_estimate(forecast, forecast, 1, gpu, "cuda"))
    none, half, every = needs

    assert none.error == TRACED_ERROR
    surely = half.error - TRACED_ERROR
    assert (1 - surely) * half.device_bytes == pytest.approx(none.device_bytes)
    assert (1 + surely) * half.device_bytes == pytest.approx(every.device_bytes)


@pytest.mark.parametrize(
    ("device_seconds", "measured", "error"), [(3.0, None, 0.25), (1.0, None, 0.5), (1.0, 4e-5, 0.25)]
)
def test_a_time_that_an_assumed_host_bounds_may_be_off_by_more(
    device_seconds: float, measured: float | None, error: float
) -> None:
    gpu = find_gpu("H200")
    assert gpu.speeds is not None
    known = replace(gpu, speeds=replace(gpu.speeds, launch_seconds=measured))
    steps = {
        Part(MICRO_BATCH, Occurrence.FIRST): StepTime(3.0, device_seconds, 0.0, 0.0, 0.0, 2.0),
        # Evaluation counts for no step.
        Part(MICRO_BATCH, Occurrence.AFTER): StepTime(9.0, 9.0, 0.0, 0.0, 0.0, 0.0),
    }
    forecast = Forecast({}, 0.0, 0, 0, 0, 0, 0, steps)
    assert memory_estimate(forecast, forecast, 1, known, "cuda").time_error == error
    assert memory_estimate(forecast, forecast, 1, known, "cpu").time_error is None


def test_freed_blocks_that_do_not_fit_a_budget_are_none_of_the_need() -> None:
    backward = (Part(MICRO_BATCH, Occurrence.FIRST), True)
    stretches = {backward: of_one_moment({"activation": 34 * GIB})}
    forecast = Forecast(stretches, 0.0, 0, 18 * GIB, 17 * GIB, 0, 0, {})
    memory = memory_estimate(forecast, forecast, 1, find_gpu("H200"), "cuda")
    tight = memory.within(memory.device_bytes - 1)

    assert memory.within(memory.device_bytes) == memory
    assert tight.device_bytes == memory.device_bytes - 17 * GIB
    assert sum(tight.breakdown.values()) == tight.device_bytes
    assert memory.within(tight.device_bytes) == tight
    assert memory.within(tight.device_bytes - 1) == memory
