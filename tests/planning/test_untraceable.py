"""The reason why a candidate cannot be traced."""

from __future__ import annotations

from pathlib import Path

from autotune.inspection.gpus import find_gpu
from autotune.planning.evaluator import Evaluator
from autotune.planning.tracing.cache import Cache
from autotune.planning.tracing.store import Traces
from autotune.units import GIB
from tests.planning.stand_in import UNTRACEABLE, AnalyticTracer
from tests.settings import problem, setting


def test_what_breaks_a_rule_and_cannot_be_traced_has_the_rule_as_its_reason(tmp_path: Path) -> None:
    here = problem(setting(), {"max_length": 1024})
    traces = Traces(AnalyticTracer(), Cache(tmp_path), "model", {})
    evaluator, asked = Evaluator(here, find_gpu("H100-80GB"), GIB, traces), here.baseline.but(attention=UNTRACEABLE)
    evaluator.run([asked])
    why = "attention=flex_attention: flex_attention has no backward pass on a CPU"
    assert evaluator.untraceable == {asked: why}
