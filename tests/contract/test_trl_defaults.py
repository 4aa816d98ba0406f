"""Contract with TRL: its names, defaults and secrets are those of the catalogue; fails if a release changes them."""

from __future__ import annotations

import dataclasses
import os
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest
from accelerate.commands.launch import launch_command_parser
from trl import DatasetMixtureConfig, GRPOConfig, ModelConfig, SFTConfig, TrlParser

from autotune import catalogue
from autotune.confidential import is_secret
from autotune.core.plan import TrainingPlan
from autotune.errors import InputError
from autotune.techniques import find
from autotune.techniques.base import Effect, NumberTechnique
from autotune.trainers import trainers
from tests.contract.building import config_class
from tests.settings import GPU, setting, workload

SFT = trainers()["sft"]
HERE = setting(machine=GPU)
BASELINE = SFT.defaults(HERE)


def test_the_baseline_is_what_trl_does_when_it_is_told_nothing(tmp_path: Path) -> None:
    plan = SFT.plan(BASELINE, HERE)
    untold = SFTConfig(str(tmp_path), use_cpu=True)
    said = {name: value for name, value in plan.args.items() if name != "model_init_kwargs"}
    # TRL evaluates at 8 rows whatever it trains with; here they are equal because TRL's default for both is 8.
    assert said == {name: getattr(untold, name) for name in said}


def test_the_baseline_s_model_is_what_trl_s_command_line_loads() -> None:
    plan = SFT.plan(BASELINE, HERE)
    untold = ModelConfig()
    assert plan.model["dtype"] == untold.dtype
    assert plan.model["use_peft"] == untold.use_peft
    # None leaves the choice to transformers, which takes sdpa where the architecture has it.
    assert (plan.model["attn_implementation"], untold.attn_implementation) == ("sdpa", None)


def test_adapters_keep_trl_s_ratio_of_alpha_to_rank() -> None:
    untold = ModelConfig()
    model = SFT.plan(BASELINE.but(lora=f"r{untold.lora_r}"), HERE).model
    assert model["lora_alpha"] == untold.lora_alpha


@pytest.mark.parametrize("name", trainers())
def test_trainings_have_as_many_epochs_as_a_pass_before_them_is_spread_over(name: str, tmp_path: Path) -> None:
    untold = config_class(name)(str(tmp_path), use_cpu=True, bf16=False)
    assert TrainingPlan(name).epochs == untold.num_train_epochs


@pytest.mark.parametrize("name", trainers())
def test_every_choice_is_written_in_fields_that_trl_has(name: str, tmp_path: Path) -> None:
    trainer = trainers()[name]
    here = setting(machine=GPU, of=workload(trainer=name))
    baseline = trainer.defaults(here)
    for technique in trainer.techniques:
        for option in technique.options:
            # Some spellings, such as coverage, name nothing for a trainer that cuts no rows.
            with suppress(InputError):
                plan = trainer.plan(baseline.but(**{technique.name: technique.parse(option.choice, here)}), here)
                ModelConfig(**plan.model)
                assert plan.args.keys() <= {field.name for field in dataclasses.fields(config_class(name))}
    config_class(name)(str(tmp_path), use_cpu=True, **trainer.plan(baseline, here).args)


@pytest.mark.parametrize("name", trainers())
def test_the_catalogue_has_the_trainer_s_own_numbers(name: str) -> None:
    fields = dataclasses.fields(config_class(name))
    untold = {field.name: field.default for field in fields if type(field.default) in (int, float)}
    rows = [row for row in catalogue(trainer=name, device="cpu") if row.knob in untold]
    assert {row.knob: float(row.default) for row in rows} == {row.knob: untold[row.knob] for row in rows}
    numbers = [row for row in rows if isinstance(find(row.knob, trainers()[name].techniques), NumberTechnique)]
    for row in numbers:
        exact = [str(option.choice) for option in row.options if option.effect == Effect.EXACT]
        assert exact == [row.default]


def test_the_catalogue_names_what_changes_training_with_one_trainer_alone() -> None:
    length, shared = (
        next(row for row in catalogue(trainer=name, device="cpu") if row.knob == "max_length")
        for name in ("online_dpo", "dpo")
    )
    assert {option.effect for option in length.options} == {Effect.CHANGES_TRAINING}
    assert {option.effect for option in shared.options} == {Effect.EXACT}


def test_trl_ships_a_file_that_starts_one_process_without_an_engine() -> None:
    import yaml
    from trl.cli.accelerate_config import resolve_accelerate_config_argument

    option, file, *further = resolve_accelerate_config_argument(["--accelerate_config", "single_gpu", "--x"])
    assert (option, further) == ("--config_file", ["--x"])
    document = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    assert document["distributed_type"] == "NO"
    assert document.get("gpu_ids", "all") == "all"
    assert not document.keys() & {"deepspeed_config", "fsdp_config", "parallelism_config", "dynamo_config"}


def test_a_variable_of_the_file_takes_the_place_of_the_user_s(tmp_path: Path) -> None:
    # So a bundle does not name the GPU there.
    (tmp_path / "config.yaml").write_text("env: {CUDA_VISIBLE_DEVICES: '0'}\n", encoding="utf-8")
    with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": "3"}):
        TrlParser((ModelConfig,)).parse_args_and_config(["--config", str(tmp_path / "config.yaml")])
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"


def test_these_keys_are_secret_and_no_others() -> None:
    kinds = (SFTConfig, GRPOConfig, ModelConfig, DatasetMixtureConfig)
    names = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    names |= {name for trainer in trainers().values() for name in trainer.fields}
    names |= {action.dest for action in launch_command_parser()._actions}
    assert {"hub_token", "eos_token", "pad_token"} <= names
    assert {name for name in names if is_secret(name)} == {"hub_token", "aws_access_key_id", "aws_secret_access_key"}
