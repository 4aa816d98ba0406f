"""A real run of ``check --probe``: its time limit, and the verdict after the run has ended."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from autotune.app.arguments import CheckArguments, time_limit
from autotune.app.check import check, fitting
from autotune.app.check.need import CheckAnswer, judge_by_probe
from autotune.app.planned import planned_machine
from autotune.cli.parser import read_arguments
from autotune.core.documents.verdict import Outcome
from autotune.core.machine import Machine
from autotune.core.measurement import Measurement, OutOfMemory
from autotune.core.plan import TrainingPlan
from autotune.core.rows.batch_geometry import BatchGeometry, Layout, Shape, Typical
from autotune.core.status import ProbeStatus
from autotune.errors import InputError
from autotune.planning.single import SizedPlan
from autotune.probing import JobServer
from autotune.userconfig.launch import Launching
from tests.app.check.conftest import Checked, Write
from tests.settings import workload


def test_a_run_that_takes_longer_than_its_time_leaves_the_answer_open(
    write: Write, checked: Checked, job_server: JobServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "JobServer", lambda *_, **__: nullcontext(job_server))
    file = write("sft", "use_cpu: true\nbf16: false\n")
    # A training takes seconds, on any machine.
    found = checked(config=str(file), trainer="sft", probe=True, timeout=1e-3)
    assert (found.outcome, found.need) == (Outcome.UNKNOWN, None)
    assert "the run was ended after 1 ms (--timeout)" in found.headline


def test_the_time_is_a_duration_as_of_the_command_probe() -> None:
    words = read_arguments(["check", "c.yaml", "--probe", "--timeout", "1m30s"]).arguments
    assert time_limit(CheckArguments("config.yaml", timeout=words.timeout, probe=words.probe).timeout) == 90


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("num_processes: 8\n", "8 processes need 8 GPUs, and 2 GPUs are visible: leave out --probe to trace it"),
        ("num_processes: 2\nnum_machines: 2\n", "it trains on 2 machines, and --probe runs on this one"),
    ],
)
def test_what_this_machine_has_too_few_gpus_to_run_is_not_wrong(
    body: str, said: str, write: Write, checked: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "planned_machine", lambda *_, **__: planned_machine("H100-80GB", 2))
    verdict = checked(config=str(write("sft", body)), trainer="sft", probe=True)
    assert (verdict.outcome, verdict.exit_code) == (Outcome.UNKNOWN, 3)
    assert said in verdict.headline


def test_a_machine_without_a_gpu_is_offered_its_cpu_and_a_trace(
    write: Write, checked: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(_: object) -> Machine:
        raise InputError("There is no GPU here.", hint="Name one with --gpu.")

    monkeypatch.setattr(check, "planned_machine", absent)
    with pytest.raises(InputError, match=r"no GPU here\. Replace --probe by --gpu .*use_cpu: true"):
        checked(config=str(write("sft", "")), trainer="sft", probe=True)


def test_as_many_processes_as_there_are_gpus_are_run_and_any_number_on_a_cpu() -> None:
    assert not check._why_probe_cannot_run_here(2, Launching(2))
    assert not check._why_probe_cannot_run_here(None, Launching(8, machines=2))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (CheckArguments("config.yaml", timeout="90s"), "--timeout is the time limit of --probe"),
        (CheckArguments("config.yaml", timeout="soon", probe=True), "'soon' is not a duration"),
        (CheckArguments("config.yaml", timeout=0, probe=True), "A time-out of 0 seconds is not possible"),
        (CheckArguments("config.yaml", imports=True, fits=False), "--import has no effect with --no-fit"),
        (CheckArguments("config.yaml", gpu="H100-80GB", fits=False), "--gpu has no effect with --no-fit"),
        (CheckArguments("config.yaml", memory_budget="8GiB", fits=False), "--memory-budget has no effect"),
        (CheckArguments("config.yaml", probe=True, gpu="H100-80GB"), "--probe runs on this machine's device"),
        (CheckArguments("config.yaml", probe=True, fits=False), "--probe has no effect with --no-fit"),
    ],
)
def test_options_that_do_not_go_together_are_told(asked: CheckArguments, said: str) -> None:
    with pytest.raises(InputError, match=said):
        check.check(asked)


def judged(measured: Measurement, folder: Path, monkeypatch: pytest.MonkeyPatch) -> CheckAnswer:
    monkeypatch.setattr("autotune.app.check.need.probe", lambda *_: measured)
    worst = Shape(1, 16)
    sized = SizedPlan(TrainingPlan("sft", {}), BatchGeometry(Layout.PADDED, worst, (Typical(worst),), 16, 1, 1))
    server: Any = None
    return judge_by_probe(sized, workload(), planned_machine("cpu"), 1, server, folder, None)


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
    answer = judged(measured, tmp_path, monkeypatch)
    assert (answer.outcome, answer.reason) == (Outcome.DOES_NOT_FIT, "memory ran out")
    assert (answer.need.bytes if answer.need is not None else None) == bytes_needed


@pytest.mark.parametrize(("unexplained", "outcome"), [(True, Outcome.UNKNOWN), (False, Outcome.CANNOT_RUN)])
def test_a_run_that_was_killed_for_an_unknown_reason_leaves_the_answer_open(
    unexplained: bool, outcome: Outcome, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured = Measurement(ProbeStatus.CRASHED, "killed by signal 9", unexplained=unexplained)
    answer = judged(measured, tmp_path, monkeypatch)
    assert (answer.outcome, answer.need, answer.reason) == (outcome, None, "killed by signal 9")
