"""The self-test of packing runs once for a model, a device and a version of the software."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.app.workload import WorkloadReader
from autotune.core.events import Event, StageStarted
from autotune.core.workload import Workload
from autotune.inspection.dataset import dataset_source
from autotune.inspection.machine import machine
from autotune.inspection.model import model_source
from autotune.planning.tracing.cache import Cache
from autotune.probing import JobServer
from tests.small import write_small_model

STAGE = "Checking that packed documents stay apart with "


@pytest.fixture(scope="module")
def workload(job_server: JobServer, tmp_path_factory: pytest.TempPathFactory) -> Workload:
    folder = tmp_path_factory.mktemp("workload")
    model = write_small_model(folder / "model", "llama", weights=False)
    (folder / "rows.jsonl").write_text('{"text": "some words"}\n' * 4, encoding="utf-8")
    reader = WorkloadReader(job_server, folder / "read", lambda _: None)
    return reader.read("sft", model_source(str(model), "random"), dataset_source(str(folder / "rows.jsonl")))


@pytest.fixture
def checked(job_server: JobServer, tmp_path: Path) -> Callable[..., tuple[Workload, list[str]]]:
    def check(workload: Workload, *attentions: str) -> tuple[Workload, list[str]]:
        heard: list[Event] = []
        reader = WorkloadReader(job_server, tmp_path / "job", heard.append)
        found = reader.check_attention(workload, machine("cpu"), attentions, Cache(tmp_path / "cache"))
        return found, [event.text.removeprefix(STAGE) for event in heard if isinstance(event, StageStarted)]

    return check


def test_only_what_was_not_tested_before_is_tested(
    workload: Workload, checked: Callable[..., tuple[Workload, list[str]]]
) -> None:
    first, tested = checked(workload, "sdpa", "eager")
    assert tested == ["sdpa, eager"]
    again, tested = checked(workload, "eager", "sdpa")
    assert (again.packing_checks, tested) == (first.packing_checks, [])


def test_another_model_is_tested_anew(workload: Workload, checked: Callable[..., tuple[Workload, list[str]]]) -> None:
    checked(workload, "eager")
    other = replace(workload, model=replace(workload.model, fingerprint="another"))
    assert checked(other, "eager")[1] == ["eager"]


def test_what_did_not_run_is_tested_again(
    workload: Workload, checked: Callable[..., tuple[Workload, list[str]]]
) -> None:
    first, _ = checked(workload, "unheard-of")
    assert not first.packing_checks["unheard-of"].supported
    assert checked(workload, "unheard-of")[1] == ["unheard-of"]
