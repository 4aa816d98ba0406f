"""Rows with images are refused for trainers that are traced on text alone; a probe goes on without predictions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.app.ahead import traced_ahead
from autotune.app.requests import traces_of
from autotune.core.gpu import GpuSpeeds
from autotune.errors import UnreadError
from autotune.planning.tracing.cache import Cache
from autotune.units import GIB
from tests.planning.stand_in import AnalyticTracer
from tests.settings import GPU, pictured_workload, problem, setting

REFUSED = "rows.jsonl has images, and autotune plans and checks KTO on rows of text alone"
PICTURED = replace(pictured_workload(), trainer="kto")


def unmeasured() -> GpuSpeeds:
    raise AssertionError("speeds are of no use without traces")


def test_plans_are_refused_and_checks_do_not_know(tmp_path: Path) -> None:
    with pytest.raises(UnreadError, match=REFUSED):
        traces_of(PICTURED, GPU, AnalyticTracer(), Cache(tmp_path))


def test_a_probe_says_so_and_goes_on(tmp_path: Path) -> None:
    tracer, here = AnalyticTracer(), problem(setting(machine=GPU, of=PICTURED))
    ahead = traced_ahead(here, GIB, tracer, Cache(tmp_path), unmeasured, 60.0, lambda _: None)
    assert ahead.predictor is None
    assert REFUSED in " ".join(ahead.notes())
    assert not tracer.requests
