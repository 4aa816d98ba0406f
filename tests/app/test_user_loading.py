"""Arguments that load the model of a user's configuration object are respected, or refused by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BitsAndBytesConfig
from trl import ModelConfig
from trl.trainer.utils import create_model_from_path

from autotune.errors import InputError
from autotune.step.objects import quantization_config as traced_quantization
from tests.app.configured import plan_of, sft, user_plan
from tests.small import write_small_model


def test_types_and_attention_of_the_model_are_taken_over() -> None:
    loading = {"dtype": torch.bfloat16, "attn_implementation": "eager", "device_map": "auto"}
    words = plan_of(sft(model_init_kwargs=loading)).model
    assert (words["dtype"], words["attn_implementation"]) == ("bfloat16", "eager")
    assert set(words) <= {field.name for field in dataclasses.fields(ModelConfig)}


@pytest.mark.parametrize(
    "loading",
    [{}, {"torch_dtype": "bfloat16"}, {"dtype": None}, {"dtype": None, "torch_dtype": "float16"}, {"dtype": "auto"}],
    ids=str,
)
def test_the_type_is_that_in_which_trl_loads_the_model(loading: dict[str, Any], tmp_path: Path) -> None:
    model = str(write_small_model(tmp_path / "model", dtype="bfloat16"))
    loaded = create_model_from_path(model, device_map=None, **loading)
    words = user_plan(sft(model_init_kwargs=loading), None).plan.model
    assert str(words["dtype"]).replace("auto", "bfloat16") == str(loaded.dtype).removeprefix("torch.")


def test_what_would_change_the_model_while_it_is_loaded_is_refused() -> None:
    with pytest.raises(InputError, match="num_hidden_layers=2"):
        plan_of(sft(model_init_kwargs={"num_hidden_layers": 2}))
    with pytest.raises(InputError, match="subfolder='other'"):
        plan_of(sft(model_init_kwargs={"subfolder": "other"}))


def test_what_places_and_replaces_layers_is_in_the_plan_and_layers_on_several_devices_are_refused() -> None:
    places: list[dict[str, object]] = [{"device_map": place} for place in ("auto", None, {"": 0})]
    for given in (*places, {"use_kernels": True}, {"experts_implementation": "eager"}):
        assert plan_of(sft(model_init_kwargs=given)).args["model_init_kwargs"] == given
    with pytest.raises(InputError, match="device_map="):
        plan_of(sft(model_init_kwargs={"device_map": {"model.layers.0": "cpu", "": 0}}))


def test_four_bit_weights_are_traced_as_they_are_given() -> None:
    given = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_quant_storage=torch.bfloat16,
    )
    user = user_plan(sft(model_init_kwargs={"dtype": "bfloat16", "quantization_config": given}), None)
    rebuilt = traced_quantization(user.plan)
    assert rebuilt is not None
    assert rebuilt.to_dict() == given.to_dict()
    assert user.assumptions == ()


def test_a_type_to_compute_in_that_is_not_the_models_is_said_to_be_left_out() -> None:
    given = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float16)
    user = user_plan(sft(model_init_kwargs={"dtype": "bfloat16", "quantization_config": given}), None)
    assert user.assumptions == ("4-bit weights are expanded to bfloat16, as TRL would, not to float16",)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "Quantisation by gptq is not supported"),
        ({"load_in_8bit": True, "llm_int8_skip_modules": ["lm_head"]}, "llm_int8_skip_modules"),
        # Without a threshold, bitsandbytes multiplies no outliers apart.
        ({"load_in_8bit": True, "llm_int8_threshold": 0.0}, "llm_int8_threshold=0.0"),
    ],
)
def test_quantisation_that_is_not_understood_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        plan_of(sft(model_init_kwargs={"quantization_config": given}))
