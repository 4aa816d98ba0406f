"""Contract with TRL: its words and defaults are what the catalogue says. Fails when a TRL release changes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.core.candidate import Candidate
from autotune.techniques.base import Technique
from autotune.trainers import find_trainer, trainers
from tests.settings import GPU, setting

SFT = trainers()["sft"]


def test_the_baseline_is_what_trl_does_when_it_is_told_nothing(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    here = setting(machine=GPU)
    baseline = Candidate({item.name: item.default(here) for item in SFT.techniques})
    plan = SFT.plan(baseline, here)
    untold = trl.SFTConfig(str(tmp_path), use_cpu=True)
    said = {name: value for name, value in plan.args.items() if name != "model_init_kwargs"}
    # TRL evaluates at 8 rows whatever it trains with; here they are equal because TRL's default for both is 8.
    assert said == {name: getattr(untold, name) for name in said}


def test_the_baseline_s_model_is_what_trl_s_command_line_loads(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    here = setting(machine=GPU)
    plan = SFT.plan(Candidate({item.name: item.default(here) for item in SFT.techniques}), here)
    untold = trl.ModelConfig()
    assert plan.model["dtype"] == untold.dtype
    assert plan.model["use_peft"] == untold.use_peft
    # None leaves the choice to transformers, which takes sdpa where the architecture has it.
    assert (plan.model["attn_implementation"], untold.attn_implementation) == ("sdpa", None)


def test_adapters_keep_trl_s_ratio_of_alpha_to_rank() -> None:
    trl = pytest.importorskip("trl")
    untold = trl.ModelConfig()
    here = setting(machine=GPU)
    baseline = Candidate({item.name: item.default(here) for item in SFT.techniques})
    model = SFT.plan(baseline.but(lora=f"r{untold.lora_r}"), here).model
    assert model["lora_alpha"] == untold.lora_alpha


@pytest.mark.parametrize("technique", find_trainer("sft").techniques, ids=lambda item: item.name)
def test_every_choice_is_written_in_fields_that_trl_has(technique: Technique, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    here = setting(machine=GPU)
    baseline = Candidate({item.name: item.default(here) for item in SFT.techniques})
    for option in technique.options:
        choice = technique.parse(option.choice, here)
        plan = SFT.plan(baseline.but(**{technique.name: choice}), here)
        trl.SFTConfig(str(tmp_path), use_cpu=True, **plan.args)
        trl.ModelConfig(**plan.model)
