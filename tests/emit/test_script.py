"""``train.py`` loads what was measured, and shows itself no more of the machine than that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.core.plan import TrainingPlan
from autotune.emit.bundle import write_bundle
from tests.reporting.examples import a_result, a_workload


def script_of(plan: TrainingPlan, folder: Path) -> str:
    """Return the script of a run that recommends a plan."""
    result = a_result(trainer=plan.trainer, workload=a_workload(trainer=plan.trainer))
    assert result.recommended is not None
    write_bundle(replace(result, recommended=replace(result.recommended, plan=plan)), folder)
    return (folder / "train.py").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("peft", "loads"), [({}, True), ({"peft_type": "IA3"}, False)], ids=["TRL's arguments", "PEFT's own file"]
)
def test_a_reference_is_loaded_only_where_no_adapter_can_be_switched_off(
    peft: dict[str, object], loads: bool, tmp_path: Path
) -> None:
    plan = TrainingPlan("online_dpo", {"use_cpu": True}, {"use_peft": True}, peft=peft)
    script = script_of(plan, tmp_path)
    assert ("AutoModelForCausalLM.from_pretrained" in script) == loads
    assert ("AutoModelForCausalLM" in script) == loads
    compile(script, "train.py", "exec")
