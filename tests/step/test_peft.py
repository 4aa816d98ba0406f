"""Configurations in PEFT's own JSON: accepted keys, keys that PEFT would silently ignore, and unsuitable models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from peft import get_peft_model

from autotune.core.plan import TrainingPlan
from autotune.errors import InputError
from autotune.step.models.loading import meta_model, model_class
from autotune.step.models.peft import check_peft, peft_from_json
from autotune.step.objects import peft_config
from tests.small import small_config
from tests.vision import FAMILIES, small_vision_config

PAGE = Path(__file__).resolve().parents[2] / "docs" / "images.md"

LANGUAGE = r".*(language|text)_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
"""The one entry of ``lora_target_modules`` in docs/images.md."""
FITTING: list[dict[str, Any]] = [
    {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], "layers_to_transform": [0]},
    {"peft_type": "IA3", "target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    {"peft_type": "PROMPT_TUNING", "task_type": "CAUSAL_LM", "num_virtual_tokens": 4},
    {"peft_type": "VERA", "target_modules": ["q_proj"], "r": 4},
]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_regular_expression_in_trl_s_own_key_keeps_adapters_to_the_language_model(family: str) -> None:
    """A list of one entry becomes a text, which PEFT reads as a regular expression."""
    config = small_vision_config(family)
    adapted = {}
    for targets in ([LANGUAGE], ["all-linear"]):
        entries = {"use_peft": True, "lora_r": 4, "lora_target_modules": targets}
        found = peft_config(TrainingPlan("sft", model=entries))
        names = [
            name
            for name, _ in get_peft_model(meta_model(model_class(config), config), found).named_modules()
            if name.endswith("lora_A")
        ]
        assert names
        adapted[targets[0]] = [name for name in names if "language_model" not in name and "text_model" not in name]
    assert adapted[LANGUAGE] == []
    assert adapted["all-linear"] != []
    assert LANGUAGE in PAGE.read_text(encoding="utf-8")


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
