"""Of the keys that TRL and accelerate take, those that hold a secret are known as such."""

from __future__ import annotations

import dataclasses

from accelerate.commands.launch import launch_command_parser
from trl import DatasetMixtureConfig, GRPOConfig, ModelConfig, SFTConfig

from autotune.confidential import is_secret
from autotune.trainers import trainers


def test_these_keys_are_secret_and_no_others() -> None:
    kinds = (SFTConfig, GRPOConfig, ModelConfig, DatasetMixtureConfig)
    names = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    names |= {name for trainer in trainers().values() for name in trainer.fields}
    names |= {action.dest for action in launch_command_parser()._actions}
    assert {"hub_token", "eos_token", "pad_token"} <= names
    assert {name for name in names if is_secret(name)} == {"hub_token", "aws_access_key_id", "aws_secret_access_key"}
