"""``autotune plan --output`` reports the written files, or why there are none, with the exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.cli.boundary import run
from autotune.core.documents.bundle import PlannedBundle
from autotune.core.documents.estimate import Plan
from autotune.core.files.codec import decode
from autotune.errors import InputError, UnwrittenError
from tests.emit.planned_bundles import a_bundle
from tests.reporting.plans import a_plan


@pytest.mark.parametrize(
    ("bundle", "unwritten", "code", "said"),
    [
        (a_bundle(None, directory="/out"), "", 0, "wrote /out, planned and not measured"),
        (None, "nothing is predicted to fit", 1, "Nothing was written: nothing is predicted to fit."),
    ],
    ids=["written", "nothing to write"],
)
def test_what_was_written_or_why_not_is_told_and_ends_the_command(
    bundle: PlannedBundle | None,
    unwritten: str,
    code: int,
    said: str,
    api: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    given: dict[str, Any] = {}

    def found(**options: Any) -> Plan:
        given.update(options)
        return a_plan(bundle=bundle, unwritten=unwritten)

    api(plan=found)
    assert run(["autotune", "plan", "M", "D", "--output", "out", "--server-gpus", "2", "--json"]) == code
    assert (given["output"], given["server_gpus"]) == ("out", 2)
    shown = capsys.readouterr()
    assert decode(Plan, json.loads(shown.out)).bundle == bundle
    assert shown.err.splitlines()[-1] == said


def test_a_plan_is_shown_though_its_bundle_cannot_be_written(
    api: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    def unwritten(**_: object) -> Plan:
        raise UnwrittenError(InputError("/out/config.yaml cannot be written: No space left on device."), a_plan())

    api(plan=unwritten)
    assert run(["autotune", "plan", "M", "D", "--output", "out", "--json"]) == 2
    shown = capsys.readouterr()
    assert json.loads(shown.out)["model"] == a_plan().model
    assert shown.err.splitlines()[-1] == "autotune: /out/config.yaml cannot be written: No space left on device."


def test_a_page_that_cannot_be_written_is_a_note_beside_the_plan(
    api: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def plan(**_: object) -> Plan:
        (tmp_path / "plan.html").mkdir()
        return a_plan()

    api(plan=plan)
    assert run(["autotune", "plan", "M", "D", "--html", str(tmp_path / "plan.html"), "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["model"] == a_plan().model
    assert shown.err.splitlines()[-1].startswith("There is no page: ")


def test_where_a_page_cannot_be_written_nothing_is_planned(
    api: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    api(plan=lambda **_: pytest.fail("planned"))
    assert run(["autotune", "plan", "M", "D", "--html", str(tmp_path / "file" / "plan.html")]) == 2
    assert "Choose another directory with --html." in capsys.readouterr().err


@pytest.mark.parametrize("words", ["--output out", "--server-gpus 2"])
def test_a_table_of_gpus_writes_no_bundle(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["autotune", "plan", "M", "D", "--gpu", "all", *words.split()]) == 2
    assert f"{words.split(maxsplit=1)[0]} is for one plan" in capsys.readouterr().err
