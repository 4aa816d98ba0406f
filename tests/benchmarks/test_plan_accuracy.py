"""Which candidates of a plan are compared with traces of all layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from autotune.core.jobs.traced import TraceRequest
from autotune.probing.tracing import Traced, Untraceable
from benchmarks.plan.accuracy import Compared, compared
from tests.planning.stand_in import UNTRACEABLE, AnalyticTracer
from tests.planning.test_evaluator import LAYERS, evaluator_of, problem_of


class ShallowTracer(AnalyticTracer):
    """Has no time for all layers."""

    def __call__(self, requests: Sequence[TraceRequest]) -> Iterable[Traced]:
        """Answer those of few layers."""
        answered = zip(requests, super().__call__(requests), strict=True)
        return [Untraceable("no time was left") if asked.layers == LAYERS else found for asked, found in answered]


def test_a_trace_of_all_layers_that_failed_is_no_exact_plan(tmp_path: Path) -> None:
    evaluator = evaluator_of(problem_of(), ShallowTracer(), tmp_path)
    evaluator.run([evaluator.problem.baseline])
    assert compared(evaluator, evaluator.problem.baseline) == "all layers could not be traced"


def test_a_plan_from_all_layers_is_not_compared_with_itself(tmp_path: Path) -> None:
    evaluator = evaluator_of(problem_of(), AnalyticTracer(), tmp_path)
    evaluator.run([evaluator.problem.baseline])
    assert isinstance(compared(evaluator, evaluator.problem.baseline), Compared)
    assert compared(evaluator, evaluator.problem.baseline) == "planned from all layers"


def test_what_cannot_be_traced_says_why(tmp_path: Path) -> None:
    evaluator = evaluator_of(problem_of(), AnalyticTracer(), tmp_path)
    candidate = evaluator.problem.baseline.but(attention=UNTRACEABLE)
    evaluator.run([candidate])
    assert compared(evaluator, candidate) == f"{UNTRACEABLE} is not supported"


def test_a_plan_that_is_linear_in_the_layers_is_exact(tmp_path: Path) -> None:
    evaluator = evaluator_of(problem_of(), AnalyticTracer(), tmp_path)
    evaluator.run([evaluator.problem.baseline])
    found = compared(evaluator, evaluator.problem.baseline)
    assert isinstance(found, Compared)
    assert found.allocated_error == pytest.approx(0.0, abs=0.01)
