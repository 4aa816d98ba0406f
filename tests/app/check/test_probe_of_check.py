"""A real run of ``check --probe`` is given its time, and what it says when that is over is not a verdict."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.app.check.asked import Asked, check_options
from autotune.app.check.need import probed
from autotune.app.planned import planned_machine
from autotune.cli.parser import read_arguments
from autotune.core.plan import TrainingPlan
from autotune.core.verdict import Outcome
from autotune.errors import InputError
from autotune.probing.tracing import ServerTracer
from autotune.units import GIB
from tests.settings import workload


def test_a_run_that_takes_longer_than_its_time_leaves_the_answer_open(tracer: ServerTracer, tmp_path: Path) -> None:
    plan = TrainingPlan("sft", {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1})
    # No process has started to train by then, on any machine.
    answer = probed(plan, workload(), planned_machine("cpu"), GIB, tracer.server, tmp_path / "probe", 1e-3)
    assert (answer.outcome, answer.need) == (Outcome.UNKNOWN, None)
    assert answer.reason.startswith("the run was ended after its time of 0.0 s (--timeout)")


def test_the_time_is_a_duration_as_of_the_command_probe() -> None:
    words = read_arguments(["check", "c.yaml", "--probe", "--timeout", "1m30s"]).arguments
    assert Asked(timeout=words.timeout, probe=words.probe).timeout_seconds == 90


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (Asked(timeout="90s"), "--timeout ends the run of --probe, and there is none"),
        (Asked(timeout="soon", probe=True), "'soon' is not a duration"),
        (Asked(timeout=0, probe=True), "A time-out of 0 seconds is not possible"),
        (Asked(imports=True, fits=False), "--import is for building the trainer"),
        (Asked(probe=True, gpu="H100-80GB"), "--probe runs on this machine's device"),
    ],
)
def test_options_that_do_not_go_together_are_told(asked: Asked, said: str) -> None:
    with pytest.raises(InputError, match=said):
        check_options(asked)
