"""Contract with TRL: its words and defaults are what the catalogue says. Fails when a TRL release changes them."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.core.candidate import Candidate
from autotune.errors import InputError
from autotune.trainers import trainers
from tests.contract.building import config_class
from tests.settings import GPU, setting, workload

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


@pytest.mark.parametrize("name", trainers())
def test_every_choice_is_written_in_fields_that_trl_has(name: str, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    trainer = trainers()[name]
    here = setting(machine=GPU, of=replace(workload(), trainer=name))
    baseline = Candidate({item.name: item.default(here) for item in trainer.techniques})
    for technique in trainer.techniques:
        for option in technique.options:
            # Some spellings, such as coverage, name nothing for a trainer that cuts no rows.
            with suppress(InputError):
                plan = trainer.plan(baseline.but(**{technique.name: technique.parse(option.choice, here)}), here)
                trl.ModelConfig(**plan.model)
                assert plan.args.keys() <= {field.name for field in dataclasses.fields(config_class(name))}
    config_class(name)(str(tmp_path), use_cpu=True, **trainer.plan(baseline, here).args)
