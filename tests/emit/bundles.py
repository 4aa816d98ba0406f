"""Results that recommend a plan, and what the files of their bundles say."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.core.documents.result import Result
from autotune.core.plan import TrainingPlan
from tests.reporting.examples import a_result, a_workload


def recommending(plan: TrainingPlan, **changes: Any) -> Result:
    """Return the result of a run that recommends a plan."""
    result = a_result(**{"trainer": plan.trainer, "workload": a_workload(trainer=plan.trainer), **changes})
    assert result.recommended is not None
    hardware = replace(result.hardware, processes=plan.launch.processes)
    return replace(result, hardware=hardware, recommended=replace(result.recommended, plan=plan))


def text_of(file: Path) -> str:
    """Return a text without the line breaks and the signs of comments."""
    return " ".join(re.sub(r"^#", "", file.read_text(encoding="utf-8"), flags=re.MULTILINE).split())


def arguments_in(script: Path) -> dict[str, Any]:
    """Return the arguments that a script recommends."""
    (said,) = (
        node.value
        for node in ast.parse(script.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "RECOMMENDED"
    )
    found: dict[str, Any] = ast.literal_eval(said)
    return found
