"""What is secret in a base is used by TRL's parser alone: no plan, no text, no diff and no file has it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from autotune.app.base.edit import Wanted, edits_of, rewritten, values_after
from autotune.app.check.mixture import of_entries
from autotune.app.search import fingerprint
from autotune.confidential import SHOWN
from autotune.core.codec import encode
from autotune.core.result import BaseFile
from autotune.errors import InputError
from autotune.inspection.yaml_edit import unified_diff
from tests.app.bases import a_base, started

SECRET = "planted0secret"
FILE = f"""\
learning_rate: 1e-4   # do not touch
push_to_hub: true
hub_token: {SECRET}1   # mine
eos_token: </s>
model_init_kwargs:
  dtype: float32
  token: {SECRET}2
env:
  HF_TOKEN: {SECRET}3
  WANDB_PROJECT: mine
gradient_checkpointing: false
"""


def test_nothing_that_is_made_of_a_base_has_its_secrets(tmp_path: Path) -> None:
    base = a_base(tmp_path, FILE)
    search = started(base)
    plan = search.problem.trainer.plan(search.problem.baseline.but(gradient_checkpointing="on"), search.problem.setting)
    edits = edits_of(base, Wanted(plan), search.problem.trainer, search.problem.setting)
    text = rewritten(base, edits)
    values = yaml.safe_load(text)
    assert values == values_after(base, edits)
    assert "hub_token" not in values
    assert (values["model_init_kwargs"], values["env"]) == ({"dtype": "float32"}, {"WANDB_PROJECT": "mine"})
    assert (values["eos_token"], values["push_to_hub"], values["gradient_checkpointing"]) == ("</s>", True, True)
    assert "# mine" in text
    diff = unified_diff(base.file.text, text, base.name)
    assert f"-hub_token: {SHOWN}" in diff.replace("'", "")
    everything = (base, base.file.text, search.start, search.problem.setting, plan, diff, text)
    assert SECRET not in repr(everything)
    assert SHOWN not in json.dumps(encode([plan, search.start.base]))


def test_a_study_is_the_same_with_another_token(tmp_path: Path) -> None:
    one, other = (
        fingerprint(started(a_base(tmp_path, f"hub_token: {token}\n", name=f"{token}.yaml")).problem, 1)
        for token in ("first", "second")
    )
    assert one == other


def test_what_is_wrong_with_a_secret_is_told_without_it(tmp_path: Path) -> None:
    with pytest.raises(InputError) as raised:
        a_base(tmp_path, f"hub_token: [{SECRET}]\nhub_tokn: {SECRET}\n")
    assert SECRET not in str(raised.value)
    assert SHOWN in str(raised.value)


def test_documents_of_engines_are_read_without_their_secrets(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(
        json.dumps({"zero_optimization": {"stage": 2}, "comet": {"enabled": True, "api_key": SECRET}}), encoding="utf-8"
    )
    (tmp_path / "a.yaml").write_text(
        f"distributed_type: DEEPSPEED\ndeepspeed_config: {{deepspeed_config_file: {tmp_path / 'ds.json'}}}\n"
        f"aws_secret_access_key: {SECRET}\n",
        encoding="utf-8",
    )
    base = a_base(tmp_path, f"accelerate_config: {tmp_path / 'a.yaml'}\n")
    assert base.plan.args["deepspeed"] is not None
    assert SECRET not in repr((base.plan, base.launching))
    assert SHOWN not in repr((base.plan, base.launching))


def test_rows_at_an_address_with_a_secret_are_refused() -> None:
    entry = {"path": "json", "data_files": f"https://h/r.jsonl?token={SECRET}"}
    with pytest.raises(InputError, match="need a secret") as raised:
        of_entries([entry], None, streams=False)
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ((), ""),
        (("hub_token",), "hub_token of a.yaml is secret, and so not handed over: set HF_TOKEN in the environment."),
        (
            ("env.HF_TOKEN", "hub_token", "env.WANDB_API_KEY"),
            "env.HF_TOKEN, hub_token, env.WANDB_API_KEY of a.yaml are secret, and so not handed over: set HF_TOKEN, "
            "WANDB_API_KEY in the environment.",
        ),
        (("a.password",), "a.password of a.yaml is secret, and so not handed over: write a.password there yourself."),
    ],
)
def test_how_a_training_gets_its_secrets_is_said(keys: tuple[str, ...], said: str) -> None:
    assert BaseFile("a.yaml", withheld=keys).said_withheld == said
