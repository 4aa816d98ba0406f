"""``peft_config``: a file with PEFT's own JSON becomes part of the plan, unchanged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autotune.core.candidate import Candidate
from autotune.errors import InputError
from autotune.techniques.peft_config import PeftConfig, configuration
from autotune.trainers import find_trainer
from tests.settings import setting

SFT = find_trainer("sft")
HERE = setting(allowed=frozenset({"peft_config", "lora", "quantization"}))
IA3 = {"peft_type": "IA3", "target_modules": ["k_proj"], "feedforward_modules": []}


def candidate(**choices: str) -> Candidate:
    """Return TRL's defaults on rows of full length, with these choices."""
    return SFT.defaults(HERE).but(max_length=2000, **choices)


def written(directory: Path, document: object) -> str:
    """Return the path of a file that holds a document as JSON."""
    file = directory / "adapter.json"
    file.write_text(json.dumps(document), encoding="utf-8")
    return str(file)


def test_the_choice_is_what_the_file_says_and_not_its_name(tmp_path: Path) -> None:
    choice = PeftConfig().parse(written(tmp_path, IA3))
    assert configuration(choice) == IA3
    assert PeftConfig().parse(choice) == choice


def test_the_file_of_a_saved_adapter_describes_one_to_train(tmp_path: Path) -> None:
    assert configuration(PeftConfig().parse(written(tmp_path, {**IA3, "inference_mode": True}))) == IA3


def test_the_plan_holds_it_and_says_that_adapters_are_trained(tmp_path: Path) -> None:
    plan = SFT.plan(candidate(peft_config=str(PeftConfig().parse(written(tmp_path, IA3)))), HERE)
    assert plan.peft == IA3
    assert plan.model["use_peft"] is True
    assert plan.fingerprint != SFT.plan(candidate(), HERE).fingerprint


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{not json", "it is not JSON"),
        ("[1]", "the file cannot be read"),
        ('{"r": 8}', "it has no key peft_type"),
        ("missing.json", "No such file"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(text: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason) as caught:
        PeftConfig().parse(text)
    assert "adapter_config.json" in caught.value.hint


def test_a_file_that_holds_no_mapping_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="it has no key peft_type"):
        PeftConfig().parse(written(tmp_path, ["LORA"]))


def test_two_adapters_at_once_are_illegal() -> None:
    both = candidate(peft_config='{"peft_type":"IA3"}', lora="r16")
    assert "another adapter" in str(SFT.illegal(both, HERE))


def test_quantised_weights_can_be_under_any_adapter() -> None:
    quantised = candidate(peft_config='{"peft_type":"IA3"}', quantization="4bit-nf4")
    assert SFT.illegal(quantised, HERE) is None
