"""The stated error of a planned need, where a part of it depends on the values of real data."""

from __future__ import annotations

import pytest

from autotune.core.program import MICRO_BATCH
from autotune.core.timeline import Occurrence, Part
from autotune.inspection.gpus import find_gpu
from autotune.planning.extrapolation.forecast import TRACED_ERROR, Forecast, memory_estimate
from autotune.units import GIB


def test_the_error_of_products_in_8_bits_reaches_from_no_column_with_outliers_to_all() -> None:
    gpu, backward = find_gpu("H200"), (Part(MICRO_BATCH, Occurrence.FIRST), True)
    needs = []
    for outlier_bytes in (0, 15 * GIB, 30 * GIB):
        forecast = Forecast({backward: {"activation": 16 * GIB, "outlier": outlier_bytes}}, 0.0, 0, 0, 0, 0, {})
        needs.append(memory_estimate(forecast, forecast, 1, gpu, "cuda"))
    none, half, every = needs

    assert none.error == TRACED_ERROR
    surely = half.error - TRACED_ERROR
    assert (1 - surely) * half.device_bytes == pytest.approx(none.device_bytes)
    assert (1 + surely) * half.device_bytes == pytest.approx(every.device_bytes)
