"""The processes of a training on a CPU share its memory, whichever setting determines their number."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.app.check import fitting
from autotune.app.check.need import CheckAnswer
from autotune.app.planned import planned_machine
from autotune.core.documents.verdict import Outcome, Verdict
from autotune.errors import InputError
from tests.app.check.conftest import Checked, Write

BODY = "use_cpu: true\nbf16: false\nmax_length: 64\nper_device_train_batch_size: 1\n"


def asked(write: Write, processes: int, **more: Any) -> dict[str, Any]:
    file = write("sft", f"{BODY}num_processes: {processes}\n", name=f"of-{processes}.yaml")
    return {"config": str(file), "trainer": "sft", **more}


def budget_bytes(processes: int) -> Any:
    """Return what each process has; what others use of the memory changes by the minute."""
    return pytest.approx(planned_machine("cpu", processes).hardware.available_bytes, rel=0.4)


def test_each_process_of_a_cpu_has_its_share_of_the_memory(write: Write, checked: Checked) -> None:
    found: dict[int, Verdict] = {}
    for processes in (1, 4):
        found[processes] = checked(**asked(write, processes))
        assert (found[processes].outcome, found[processes].processes) == (Outcome.FITS, processes)
        assert found[processes].budget_bytes == budget_bytes(processes)
    again = checked(**asked(write, 4))
    assert (again.from_cache, again.outcome, again.budget_bytes) == (True, Outcome.FITS, budget_bytes(4))


def test_a_budget_that_one_process_could_have_is_more_than_the_share_of_four(write: Write, checked: Checked) -> None:
    half = planned_machine("cpu").hardware.memory_bytes // 2
    assert checked(**asked(write, 1), memory_budget=half).outcome is Outcome.FITS
    with pytest.raises(InputError, match="GiB for each of 4 processes"):
        checked(**asked(write, 4), memory_budget=half)


def test_the_limit_of_a_real_run_is_the_share_of_each_process(
    write: Write, checked: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[int] = []

    def judged(_sized: object, _workload: object, _planned: object, limit_bytes: int, *_: object) -> CheckAnswer:
        limits.append(limit_bytes)
        return CheckAnswer(Outcome.UNKNOWN, None, "it was not run")

    monkeypatch.setattr(fitting, "judge_by_probe", judged)
    for processes in (1, 4):
        checked(**asked(write, processes), probe=True)
    assert limits == [budget_bytes(1), budget_bytes(4)]


def test_processes_of_several_machines_share_the_memory_of_their_own(write: Write, checked: Checked) -> None:
    file = write("sft", f"{BODY}num_processes: 4\nnum_machines: 2\n")
    assert checked(config=str(file), trainer="sft").budget_bytes == budget_bytes(2)
