"""What a check says of a real run that ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autotune.app.check.need import probed
from autotune.app.planned import planned_machine
from autotune.core.batch_geometry import BatchGeometry, Layout, Shape, Typical
from autotune.core.measurement import Measurement, OutOfMemory
from autotune.core.plan import TrainingPlan
from autotune.core.status import ProbeStatus
from autotune.core.verdict import Outcome
from autotune.planning.single import Sized
from tests.settings import workload

ENDED: list[Any] = [
    (ProbeStatus.HOST_OUT_OF_MEMORY, None, None),
    (ProbeStatus.HOST_OUT_OF_MEMORY, OutOfMemory("backward", None, None, None), None),
    (ProbeStatus.OUT_OF_MEMORY, OutOfMemory("backward", 2, 5, None), 7),
]


@pytest.mark.parametrize(("status", "ended", "bytes_needed"), ENDED)
def test_a_run_that_was_ended_for_memory_does_not_fit_whatever_is_known_of_its_need(
    status: ProbeStatus,
    ended: OutOfMemory | None,
    bytes_needed: int | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    measured = Measurement(status=status, reason="memory ran out", out_of_memory=ended)
    monkeypatch.setattr("autotune.app.check.need.probe", lambda *_: measured)
    worst = Shape(1, 16)
    sized = Sized(TrainingPlan("sft", {}), BatchGeometry(Layout.PADDED, worst, (Typical(worst),), 16, 1, 1, 1))
    server: Any = None
    answer = probed(sized, workload(), planned_machine("cpu"), 1, server, tmp_path, None)
    assert (answer.outcome, answer.reason) == (Outcome.DOES_NOT_FIT, "memory ran out")
    assert (answer.need.bytes if answer.need is not None else None) == bytes_needed
