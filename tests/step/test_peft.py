"""Configurations in PEFT's own JSON: what PEFT takes, what it would silently ignore, and what does not fit a model."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.core.plan import TrainingPlan
from autotune.errors import InputError
from autotune.step.models.peft import check_peft, peft_from_json
from autotune.step.objects import peft_config
from tests.small import small_config

FITTING: list[dict[str, Any]] = [
    {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], "layers_to_transform": [0]},
    {"peft_type": "IA3", "target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    {"peft_type": "PROMPT_TUNING", "task_type": "CAUSAL_LM", "num_virtual_tokens": 4},
    {"peft_type": "VERA", "target_modules": ["q_proj"], "r": 4},
]


@pytest.mark.parametrize("document", FITTING, ids=lambda document: document["peft_type"])
def test_a_method_of_peft_is_read_and_fits(document: dict[str, Any]) -> None:
    check_peft(document, small_config())
    found = peft_config(TrainingPlan("sft", model={"use_peft": True}, peft=document))
    assert found is not None
    assert found.peft_type == document["peft_type"]


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ({"peft_type": "LORAA"}, "no method 'LORAA'"),
        ({"peft_type": "IA3", "rank": 8}, "IA3 has no key 'rank'"),
        ({"peft_type": "ADALORA", "target_modules": ["q_proj"]}, "refuses it"),
    ],
)
def test_what_peft_does_not_know_is_an_input_error(document: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        peft_from_json(document)


def test_modules_that_the_model_does_not_have_are_an_input_error() -> None:
    with pytest.raises(InputError, match="does not fit llama: Target modules"):
        check_peft({"peft_type": "LORA", "target_modules": ["nothing_of_that_name"]}, small_config())
