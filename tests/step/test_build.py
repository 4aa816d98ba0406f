"""The job ``build``: the errors of a virtual construction that count as a library's refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autotune.core.jobs.traced import TraceRequest
from autotune.core.plan import TrainingPlan
from autotune.core.workload import ModelSource
from autotune.step.job import JobContext
from autotune.step.jobs.build import build
from autotune.virtual import UnknownShapeError, UnsupportedError
from tests.small import write_small_model


def _wrapped() -> Exception:
    error = ValueError("the model cannot be built")
    error.__cause__ = UnsupportedError("no trace can follow this")
    return error


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (UnknownShapeError("a shape depends on data"), ""),
        (_wrapped(), ""),
        (ValueError("max_length is negative"), "ValueError: max_length is negative"),
    ],
    ids=["shape", "cause", "library"],
)
def test_what_no_trace_can_follow_is_no_refusal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, refused: str
) -> None:
    def failing(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setitem(build.__globals__, "run_virtually", failing)
    model = write_small_model(tmp_path / "model", weights=False)
    request = TraceRequest(plan=TrainingPlan("sft"), model=ModelSource(str(model)), target="cpu", worst=((8,),))

    assert build(request, JobContext(tmp_path, 0.0)).refused == refused
