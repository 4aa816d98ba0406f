"""Copies of models with fewer layers, kinds of layers, and positions, compared with the models of transformers."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from autotune.core.workload import ModelSource
from autotune.planning.single import traced_depths
from autotune.step.data.profile import embedded_positions, layer_kinds, model_profile, positions
from autotune.step.models.loading import meta_model, model_class
from autotune.step.models.shrink import _select_layers, first_layers, shrunken_model
from tests.small import small_config, small_tokenizer
from tests.vision import small_vision_config

SHARED = {"gemma3n_text": 8, "gemma4_text": 16}
"""Models with layers that share keys and values, and how many layers they have."""
COMPUTED = {
    "jamba": 16, "bamba": 20, "falcon_h1": 6, "mamba": 6, "mamba2": 6, "falcon_mamba": 6, "recurrent_gemma": 14,
}  # fmt: skip
"""Models whose types of layers follow from other fields."""
LISTED = {"zamba2": 12}
"""Models that list some of their layers by index; the adapters of all of these are in the first one."""
MODELS = {**SHARED, **COMPUTED, "ernie4_5_moe": 10, "llama": 6, "gemma2": 8, "qwen3_moe": 6, "opt": 6, "gpt2": 6}
LAYER = re.compile(r"\.(?:layers|h)\.(\d+)\.")
CASES = pytest.mark.parametrize(("model_type", "layers"), MODELS.items())


def config_of(model_type: str, layers: int) -> Any:
    return small_config(model_type, num_hidden_layers=layers)


def built(config: Any) -> Any:
    return meta_model(model_class(config), config)


def in_layers(model: Any) -> dict[str, torch.Size]:
    """Return the shapes of a model's parameters that are in layers, by their names."""
    return {name: parameter.shape for name, parameter in model.named_parameters() if LAYER.search(name)}


def layer_of(name: str) -> int:
    found = LAYER.search(name)
    assert found is not None
    return int(found[1])


@CASES
def test_a_copy_of_fewer_layers_has_the_first_layers_of_the_model(model_type: str, layers: int) -> None:
    config = config_of(model_type, layers)
    whole = in_layers(built(config))
    for count in (1, 2, layers // 2, layers - 1, layers, layers + 1):
        copy = in_layers(built(first_layers(config, count)))
        assert copy == {name: shape for name, shape in whole.items() if layer_of(name) < count}


@pytest.mark.parametrize(("model_type", "layers"), {**SHARED, **COMPUTED, **LISTED}.items())
def test_a_shrunken_copy_is_built_and_runs(model_type: str, layers: int) -> None:
    config = config_of(model_type, layers)
    model = shrunken_model(AutoModelForCausalLM._model_mapping[type(config)], config, layers=1)
    assert model.config.num_hidden_layers <= 2
    with torch.no_grad():
        assert model(torch.arange(5)[None], use_cache=False).logits.shape[:2] == (1, 5)


@pytest.mark.parametrize(
    ("model_type", "field", "listed", "kept"),
    [
        ("zamba2", "hybrid_layer_ids", [3, 7, 11], [1]),
        ("qwen3_moe", "mlp_only_layers", [0, 3], [0, 1]),
        ("mllama_text_model", "cross_attention_layers", [3, 8], [1]),
        ("qwen4_exp_text", "ple_layer_ids", [1, 4], [1, 2]),
    ],
)
def test_layers_that_are_listed_by_index_are_listed_by_their_new_index(
    model_type: str, field: str, listed: list[int], kept: list[int]
) -> None:
    config = AutoConfig.for_model(model_type)
    setattr(config, field, listed)
    _select_layers(config, (0, 3), sharing=0)
    assert getattr(config, field) == kept


def test_a_shrunken_copy_has_layers_of_all_widths() -> None:
    # Unlike full attention, a sliding window has heads of 16: no copy with narrower ones can be built.
    config = config_of("gemma4_text", 16)
    few = shrunken_model(AutoModelForCausalLM._model_mapping[type(config)], config, layers=3)
    assert few.config.layer_types == ["sliding_attention", "full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("model_type", "sections", "scaled"),
    [("qwen2_5_vl", [16, 24, 24], [2, 3, 3]), ("qwen3_vl", [24, 20, 20], [3, 3, 2])],
)
def test_a_shrunken_copy_of_a_vision_language_model_is_narrow_and_has_two_layers_of_its_tower(
    model_type: str, sections: list[int], scaled: list[int]
) -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}
    language = {"hidden_size": 1024, "num_attention_heads": 8, "head_dim": 128, "rope_parameters": rope}
    config = small_vision_config(model_type, layers=6, language=language)
    config.vision_config.depth = 24
    model = shrunken_model(model_class(config), config, layers=2)
    text = model.config.get_text_config()
    assert (text.hidden_size, text.num_hidden_layers) == (128, 2)
    assert text.rope_parameters["mrope_section"] == scaled
    assert model.config.vision_config.depth == 2
    assert config.get_text_config().rope_parameters["mrope_section"] == sections


@CASES
def test_layers_of_one_kind_have_the_same_parameters(model_type: str, layers: int) -> None:
    config = config_of(model_type, layers)
    model = built(config)
    found: dict[str, set[tuple[object, ...]]] = {}
    for layer, kind in enumerate(layer_kinds(config, model)):
        of_layer = tuple((n.split(f".{layer}.")[1], s) for n, s in in_layers(model).items() if layer_of(n) == layer)
        found.setdefault(kind, set()).add(of_layer)
    assert all(len(structures) == 1 for structures in found.values())


@CASES
def test_the_parameters_of_the_whole_follow_from_the_depths_that_are_traced(model_type: str, layers: int) -> None:
    config = config_of(model_type, layers)

    def parameters(count: int) -> int:
        return sum(parameter.numel() for parameter in built(first_layers(config, count)).parameters())

    short, *deeper = traced_depths(layer_kinds(config, built(config)))
    each = (parameters(deeper[0]) - parameters(short)) / (deeper[0] - short) if deeper else 0
    assert parameters(short) + each * (layers - short) == parameters(layers)


@pytest.mark.parametrize(
    ("model_type", "layers", "depths"),
    [
        ("ernie4_5_moe", 10, (4, 5)),
        ("jamba", 20, (4, 8)),
        ("recurrent_gemma", 14, (5, 8)),
        ("gemma4_text", 16, (6, 8)),
        ("gemma2", 12, (2, 4)),
        ("mamba", 12, (2, 3)),
        ("llama", 12, (2, 3)),
    ],
)
def test_the_depths_that_are_traced_have_layers_of_all_kinds(
    model_type: str, layers: int, depths: tuple[int, ...]
) -> None:
    config = config_of(model_type, layers)
    kinds = layer_kinds(config, built(config))
    assert traced_depths(kinds) == depths
    assert set(kinds[: depths[0]]) == set(kinds)


def test_layers_with_the_same_parameters_differ_where_the_configuration_says_so() -> None:
    config = config_of("gemma2", 4)
    sliding, full = layer_kinds(config, built(config))[:2]
    assert sliding != full


def test_a_list_of_the_indices_of_all_layers_tells_none_apart() -> None:
    config = config_of("llama", 6)
    config.moe_layers = list(range(6))
    assert len(set(layer_kinds(config, built(config)))) == 1


def test_a_model_whose_copies_have_other_layers_is_traced_whole() -> None:
    # The last layer, and so that of every copy, has a bias.
    config = config_of("gpt_neox_japanese", 6)
    assert traced_depths(layer_kinds(config, built(config))) == (6,)


@pytest.mark.parametrize(
    ("model_type", "lacks"), [("gpt2", ("flex_attention",)), ("bloom", ("flex_attention", "flash"))]
)
def test_attention_that_an_architecture_lacks_is_refused_by_transformers(
    model_type: str, lacks: tuple[str, ...], tmp_path: Path
) -> None:
    config = small_config(model_type, hidden_size=64, n_head=4)
    profile = model_profile(ModelSource("small"), config, small_tokenizer(), tmp_path)
    assert profile.lacks_attention == lacks
    with pytest.raises(ValueError, match="flex_attention"):
        model_class(config)._from_config(config, attn_implementation="flex_attention")


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        (None, 2048),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 2048}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, 8192),
        ({"rope_type": "yarn", "factor": 4.0}, 8192),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
    ],
)
def test_yarn_adds_positions(rope: dict[str, object] | None, expected: int) -> None:
    assert positions(SimpleNamespace(max_position_embeddings=2048, rope_parameters=rope)) == expected
    assert positions(SimpleNamespace()) is None
    assert positions(SimpleNamespace(max_seq_len=2048)) == 2048  # MPT


@pytest.mark.parametrize(
    ("model_type", "works"),
    [
        ("gpt2", 32),
        ("opt", 32),
        ("bert", 32),
        ("roberta", 31),
        ("gptj", 32),
        ("codegen", 32),
        ("ctrl", 32),
        ("xglm", None),
        ("llama", None),
    ],
)
def test_rows_beyond_the_positions_that_a_model_embeds_make_it_fail(model_type: str, works: int | None) -> None:
    heads = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "word_embed_proj_dim": 64}
    heads["rotary_dim"] = 8
    config = small_config(model_type, **heads, max_position_embeddings=32, num_key_value_heads=4)
    model = AutoModel.from_config(config)
    assert embedded_positions(model, 32) == works
    model(torch.full((1, works or 33), 5))
    with pytest.raises((IndexError, RuntimeError)) if works is not None else nullcontext():
        model(torch.full((1, (works or 33) + 1), 5))
