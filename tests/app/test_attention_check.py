"""The self-test of packing runs once for each model, device and version of the software."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.app.arguments import PlanArguments
from autotune.app.options import plan_options
from autotune.app.planned import planned_workload
from autotune.app.workload import WorkloadReader
from autotune.core.events import Event, StageStarted
from autotune.core.workload import PackingCheck, Workload
from autotune.inspection.dataset import dataset_source
from autotune.inspection.machine import machine
from autotune.inspection.model import model_source
from autotune.planning.tracing.cache import Cache
from autotune.probing import JobServer
from autotune.probing.tracing import ServerTracer
from tests.settings import pictured_workload
from tests.small import write_small_model

STAGE = "Checking that packed documents do not attend to each other with "
Checked = Callable[..., tuple[Workload, list[str]]]
RUNS = "Checking that the model runs with "


@pytest.fixture(scope="module")
def workload(job_server: JobServer, tmp_path_factory: pytest.TempPathFactory) -> Workload:
    folder = tmp_path_factory.mktemp("workload")
    model = write_small_model(folder / "model", "llama", weights=False)
    (folder / "rows.jsonl").write_text('{"text": "some words"}\n' * 4, encoding="utf-8")
    reader = WorkloadReader(job_server, folder / "read", lambda _: None)
    return reader.read("sft", model_source(str(model), "random"), dataset_source(str(folder / "rows.jsonl")))


@pytest.fixture
def checked(job_server: JobServer, tmp_path: Path) -> Checked:
    def check(workload: Workload, *attentions: str) -> tuple[Workload, list[str]]:
        heard: list[Event] = []
        reader = WorkloadReader(job_server, tmp_path / "job", heard.append)
        found = reader.check_attention(workload, machine("cpu"), attentions, Cache(tmp_path / "cache"))
        return found, [event.text.removeprefix(STAGE) for event in heard if isinstance(event, StageStarted)]

    return check


def test_only_what_was_not_tested_before_is_tested(workload: Workload, checked: Checked) -> None:
    first, tested = checked(workload, "sdpa", "eager")
    assert tested == ["sdpa, eager"]
    again, tested = checked(workload, "eager", "sdpa")
    assert (again.packing_checks, tested) == (first.packing_checks, [])


@pytest.mark.parametrize(
    "changed", [{"dataset": pictured_workload().dataset}, {"trainer": "dpo"}, {"trainer": "reward"}]
)
def test_rows_that_trl_does_not_pack_need_only_an_attention_that_runs(
    changed: dict[str, Any], workload: Workload, checked: Checked
) -> None:
    checked(workload, "eager")
    unpacked = replace(workload, **changed)
    found, tested = checked(unpacked, "eager")
    assert found.packing_checks == {
        "eager": PackingCheck("eager", True, False, None, 0.0, "TRL does not pack these rows")
    }
    assert tested == [f"{RUNS}eager"]
    assert checked(unpacked, "eager")[1] == []


def test_a_plan_for_other_rows_tests_nothing_again(
    job_server: JobServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = write_small_model(tmp_path / "model", "llama", weights=False)
    tested = []
    for words in ("some words", "other words"):
        (tmp_path / "rows.jsonl").write_text(f'{{"text": "{words}"}}\n' * 4, encoding="utf-8")
        heard: list[Event] = []
        source, rows = model_source(str(model), "random"), dataset_source(str(tmp_path / "rows.jsonl"))
        options = plan_options(PlanArguments(model=str(model), dataset=rows.name))
        with ServerTracer(1, heard.append, lent=job_server) as tracer:
            planned_workload(options, source, rows, tracer, None, heard.append, checked=("eager",))
        tested.append([event.text for event in heard if isinstance(event, StageStarted) and STAGE in event.text])
    assert tested == [[f"{STAGE}eager"], []]


def test_another_model_is_tested_anew(workload: Workload, checked: Checked) -> None:
    checked(workload, "eager")
    other = replace(workload, model=replace(workload.model, fingerprint="another"))
    assert checked(other, "eager")[1] == ["eager"]


def test_what_did_not_run_is_tested_again(workload: Workload, checked: Checked) -> None:
    first, _ = checked(workload, "unheard-of")
    assert not first.packing_checks["unheard-of"].supported
    assert checked(workload, "unheard-of")[1] == ["unheard-of"]
