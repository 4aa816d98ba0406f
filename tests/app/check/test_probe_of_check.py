"""A real run of ``check --probe`` is given its time, and what it says when that is over is not a verdict."""

from __future__ import annotations

import pytest

from autotune.app.check.asked import Asked, check_options
from autotune.cli.parser import read_arguments
from autotune.core.verdict import Outcome
from autotune.errors import InputError
from tests.app.check.conftest import Checked, Write


def test_a_run_that_takes_longer_than_its_time_leaves_the_answer_open(write: Write, checked: Checked) -> None:
    file = write("sft", "use_cpu: true\nbf16: false\n")
    # A training takes seconds, on any machine.
    found = checked(config=str(file), trainer="sft", probe=True, timeout=1e-3)
    assert (found.outcome, found.need) == (Outcome.UNKNOWN, None)
    assert "the run was ended after its time of 0.0 s (--timeout)" in found.headline


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
