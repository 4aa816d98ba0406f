"""``autotune plan --output`` says what it wrote, or why it wrote nothing, and ends accordingly."""

from __future__ import annotations

import json
import sys
from types import ModuleType
from typing import Any

import pytest

from autotune.cli.boundary import run
from autotune.core.bundle import PlannedBundle
from autotune.core.codec import decode
from autotune.core.estimate import Plan
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
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given: dict[str, Any] = {}

    def found(**options: Any) -> Plan:
        given.update(options)
        return a_plan(bundle=bundle, unwritten=unwritten)

    module = ModuleType("autotune.api.plan")
    vars(module)["plan"] = found
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert run(["autotune", "plan", "M", "D", "--output", "out", "--server-gpus", "2", "--json"]) == code
    assert (given["output"], given["server_gpus"]) == ("out", 2)
    shown = capsys.readouterr()
    assert decode(Plan, json.loads(shown.out)).bundle == bundle
    assert shown.err.splitlines()[-1] == said


@pytest.mark.parametrize("words", ["--output out", "--server-gpus 2"])
def test_a_table_of_gpus_writes_no_bundle(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["autotune", "plan", "M", "D", "--gpu", "all", *words.split()]) == 2
    assert f"{words.split(maxsplit=1)[0]} is for one plan" in capsys.readouterr().err
