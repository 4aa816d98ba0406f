"""Processors and models in traces: each is loaded once, and memory is allocated before the weights."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoProcessor, BitsAndBytesConfig, modeling_utils

from autotune.core.jobs.protocol import PrepareRequest
from autotune.core.workload import DatasetSource, ModelSource
from autotune.errors import InputError, UnreadError
from autotune.probing import JobServer, prepare
from autotune.step.models import loading
from autotune.step.models.heads import LANGUAGE_MODEL
from autotune.step.models.loading import (
    cached_vocabularies,
    load_config,
    load_processor,
    processor_for,
    virtual_model,
)
from autotune.units import GIB, MIB
from tests.small import write_rows, write_small_model
from tests.virtual.alone import found_by
from tests.virtual.models import config_of
from tests.vision import small_processor, small_vision_config


@pytest.fixture
def source(tmp_path: Path) -> ModelSource:
    return ModelSource(str(write_small_model(tmp_path / "model", weights=False)))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_attention_heads": 5}, "multiple of the number of attention heads"),
        ({"num_attention_heads": 0}, "integer modulo by zero"),
        ({"layer_types": ["full_attention", "no_attention"]}, "no_attention|layer_types"),
        ({"dtype": "float13"}, "float13"),
    ],
)
def test_a_configuration_that_is_not_valid_is_an_error_that_names_the_model(
    source: ModelSource, changes: dict[str, Any], problem: str
) -> None:
    rewrite(source, changes)
    with pytest.raises(InputError, match=f"{source.name} is not valid: .*({problem})"):
        load_config(source, LANGUAGE_MODEL)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"{", "is not a valid JSON file"),
        (b"\xff\xfe", "is not a valid JSON file"),
        (b"", "is not a valid JSON file"),
        (b"[" * 100_000, "recursion"),
        (b"{}", "model_type"),
        (b"[]", "(model_type|list indices)"),
        (b'{"model_type": null}', "model type"),
    ],
)
def test_a_file_that_is_no_configuration_is_told(source: ModelSource, content: bytes, problem: str) -> None:
    (Path(source.name) / "config.json").write_bytes(content)
    with pytest.raises(InputError, match=f"configuration of {source.name} .*{problem}"):
        load_config(source, LANGUAGE_MODEL)


@pytest.mark.parametrize("left", [0, 100, -1])
def test_weights_that_are_cut_off_are_told_before_a_probe_reads_them(
    job_server: JobServer, tmp_path: Path, left: int
) -> None:
    file = write_small_model(tmp_path / "model") / "model.safetensors"
    rows = DatasetSource("rows", "json", str(write_rows(tmp_path / "rows.jsonl", [{"text": "a"}])))
    request = PrepareRequest(ModelSource(str(file.parent), "pretrained"), rows, "sft", str(tmp_path / "tokenized"))
    assert prepare(job_server, request, tmp_path / "whole").model.has_weights
    file.write_bytes(file.read_bytes()[:left])
    with pytest.raises(InputError, match=f"The weights in {file} cannot be read"):
        prepare(job_server, request, tmp_path / "torn")


def test_a_model_that_needs_its_own_code_is_an_error_that_names_the_dry_run(source: ModelSource) -> None:
    rewrite(source, {"model_type": "mine", "auto_map": {"AutoConfig": "mine.MyConfig"}})
    with pytest.raises(InputError, match=f"{source.name} contains custom code: .*, autotune never") as caught:
        load_config(source, LANGUAGE_MODEL)
    assert "autotune dry-run" in caught.value.hint


def test_a_folder_that_is_there_is_not_looked_for_elsewhere(source: ModelSource) -> None:
    rewrite(source, {"model_type": "nothing_known"})
    with pytest.raises(InputError, match="nothing_known") as caught:
        load_config(source, LANGUAGE_MODEL)
    assert caught.value.hint == ""


def test_an_architecture_that_is_no_list_is_told(source: ModelSource) -> None:
    rewrite(source, {"architectures": "LlamaForCausalLM"})
    with pytest.raises(InputError, match=r"names no architecture|Field 'architectures'"):
        load_config(source, LANGUAGE_MODEL)


@pytest.mark.parametrize("method", ["bitsandbytes", "gptq", "awq", "mxfp4"])
def test_a_checkpoint_of_quantised_weights_may_train_and_is_not_known(source: ModelSource, method: str) -> None:
    rewrite(source, {"quantization_config": {"quant_method": method, "load_in_4bit": True}})
    with pytest.raises(UnreadError, match=rf"are quantised in its checkpoint \({method}\)"):
        load_config(source, LANGUAGE_MODEL)


def test_a_checkpoint_whose_language_model_is_quantised_is_not_known(tmp_path: Path) -> None:
    quantised = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    small_vision_config("gemma3", language=quantised).save_pretrained(tmp_path)
    with pytest.raises(UnreadError, match=r"are quantised in its checkpoint \(gptq\)"):
        load_config(ModelSource(str(tmp_path)), LANGUAGE_MODEL)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_type_of_a_configuration_without_one_is_that_of_its_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    source = ModelSource(str(write_small_model(tmp_path / "model")))
    AutoModelForCausalLM.from_pretrained(source.name, dtype=dtype).save_pretrained(source.name)
    rewrite(source, {"dtype": None})
    config = load_config(source, LANGUAGE_MODEL)
    assert config.dtype is dtype is AutoModelForCausalLM.from_pretrained(source.name, dtype="auto").dtype
    assert (
        virtual_model(config, {"dtype": "auto", "attn_implementation": None}, None, torch.device("cpu")).dtype is dtype
    )


@pytest.mark.parametrize("chosen", ["eager", "batched_mm"])
def test_experts_are_computed_as_the_user_chose(chosen: str) -> None:
    loading_kwargs = {"dtype": "float32", "attn_implementation": None, "experts_implementation": chosen}
    model = virtual_model(config_of("qwen3_moe"), loading_kwargs, None, torch.device("cpu"))
    assert model.config._experts_implementation == chosen


def test_weights_are_not_quantised_without_bitsandbytes_as_transformers_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.quantizers.quantizer_bnb_4bit.is_bitsandbytes_available", lambda: False)
    in_4_bits, loading_kwargs = BitsAndBytesConfig(load_in_4bit=True), {"dtype": "auto"}
    with pytest.raises(ImportError, match="requires bitsandbytes: `pip install"):
        virtual_model(config_of("llama"), loading_kwargs, in_4_bits, torch.device("cpu"))


def rewrite(source: ModelSource, changes: dict[str, Any]) -> None:
    file = Path(source.name) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def settings(tokenizer: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(tokenizer).items() if name != "_tokenizer"}


def test_it_is_loaded_once(source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[ModelSource] = []

    def load(source: ModelSource, auto_class: type[Any]) -> Any:
        loaded.append(source)
        return load_processor(source, auto_class)

    monkeypatch.setattr("autotune.step.models.loading.load_processor", load)
    first, second = (processor_for(source, AutoProcessor) for _ in range(2))
    assert loaded == [source]
    assert first is not second
    assert first("memory and speed")["input_ids"] == second("memory and speed")["input_ids"]


def test_what_a_trainer_sets_does_not_reach_the_next_trace(source: ModelSource) -> None:
    fresh = load_processor(source, AutoProcessor)
    first = processor_for(source, AutoProcessor)
    first.pad_token, first.padding_side, first.chat_template = first.eos_token, "left", "{{ messages }}"
    first.model_input_names.append("new")
    second = processor_for(source, AutoProcessor)
    assert settings(second) == settings(fresh) != settings(first)


@pytest.mark.parametrize("change", ["words", "truncation"])
def test_neither_words_nor_a_truncation_of_a_trainer_reach_the_next_trace(source: ModelSource, change: str) -> None:
    fresh = load_processor(source, AutoProcessor)
    first = processor_for(source, AutoProcessor)
    backend: Tokenizer = first._tokenizer
    if change == "words":
        first.add_tokens(["<new>"])
    else:
        backend.enable_truncation(3)
    second = processor_for(source, AutoProcessor)
    assert len(second) == len(fresh)
    text = "memory and speed of a step"
    assert second(text)["input_ids"] == fresh(text)["input_ids"]


def test_its_words_are_read_once_until_some_are_added(source: ModelSource) -> None:
    fresh = load_processor(source, AutoProcessor).get_vocab()
    with cached_vocabularies():
        first, second = (processor_for(source, AutoProcessor) for _ in range(2))
        assert first.get_vocab() is second.get_vocab()
        assert first.get_vocab() == fresh
        first.add_tokens(["<new>"])
        assert first.get_vocab().keys() - fresh == {"<new>"}


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="torchvision is installed")
def test_a_processor_without_a_package_that_it_needs_names_it(tmp_path: Path) -> None:
    processor = small_processor("qwen2_5_vl")
    processor.tokenizer.save_pretrained(tmp_path)
    processor.image_processor.save_pretrained(tmp_path)
    small_vision_config("qwen2_5_vl").save_pretrained(tmp_path)
    file = tmp_path / "preprocessor_config.json"
    written = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**written, "processor_class": "Qwen2_5_VLProcessor"}), encoding="utf-8")
    with pytest.raises(InputError, match="requires the Torchvision library") as raised:
        load_processor(ModelSource(str(tmp_path)), AutoProcessor)
    assert "trl[vlm]" in raised.value.hint


_SCRIPT = """
import json
import torch
from autotune.step.models.loading import virtual_model
from autotune.virtual import trace
from tests.virtual.models import config_of

kept, events = [], []
for how in ({}, {"device_map": "auto"}, {"device_map": None}, {"device_map": {"": 0}}):
    loading = {"dtype": "float32", "attn_implementation": "sdpa", **how}
    traced = trace(lambda device: kept.append(virtual_model(config_of("llama"), loading, None, device)))
    events.append([event.change_bytes for event in traced.events])
weights = {id(tensor): tensor.numel() * 4 for tensor in kept[0].parameters()}
print(json.dumps([sum(weights.values()), events]))
"""


@pytest.fixture(scope="module")
def found(job_server: JobServer) -> tuple[int, list[list[int]]]:
    """Bytes of the weights of a model whose head is its embedding, and the sizes of what was allocated and freed.

    They come for each way to choose the model's devices: spread over devices twice, on the host, and on a given one.
    """
    weights, events = found_by(job_server, _SCRIPT)
    return weights, events


def test_a_number_is_allocated_and_freed_before_where_layers_are_spread_by_the_memory_of_devices(
    found: tuple[int, list[list[int]]],
) -> None:
    by_default, spread, _, given = found[1]

    assert by_default[:2] == spread[:2] == [8, -8]
    # The weights fit into the segment of that number, so that there is no block for them.
    assert by_default[2:] == spread[2:] == given[2:]


def test_no_block_is_allocated_for_weights_that_are_loaded_to_the_host(found: tuple[int, list[list[int]]]) -> None:
    _, _, to_the_host, given = found[1]

    assert to_the_host == given[2:]


def test_one_block_for_all_weights_is_allocated_and_freed_before_them(found: tuple[int, list[list[int]]]) -> None:
    weights, [*_, events] = found

    assert events[:2] == [weights, -weights]
    assert max(events[2:]) < weights


def test_each_weight_is_allocated_once_though_two_modules_have_it(found: tuple[int, list[list[int]]]) -> None:
    weights, [*_, events] = found
    frequencies = 2 * 4 * 16 // 2

    assert sum(events[2:]) == weights + frequencies
    assert all(size > 0 for size in events[2:])


_QUANTIZED = """
import json
from transformers import BitsAndBytesConfig
from autotune.step.models.loading import virtual_model
from autotune.virtual import trace
from tests.small import small_config

kept, config = [], small_config("gpt2", num_hidden_layers=2, hidden_size=64, num_attention_heads=4)
loading, quantization = {"dtype": "float32", "attn_implementation": "sdpa"}, BitsAndBytesConfig(load_in_8bit=True)
trace(lambda device: kept.append(virtual_model(config, loading, quantization, device)))
print(json.dumps({name: str(weight.dtype) for name, weight in kept[0].named_parameters() if ".c_" in name}))
"""


def test_the_convolutions_of_gpt_2_are_quantised_as_linear_modules_are(job_server: JobServer) -> None:
    types = found_by(job_server, _QUANTIZED)
    assert {type_ for name, type_ in types.items() if name.endswith(".weight")} == {"torch.int8"}
    assert {type_ for name, type_ in types.items() if name.endswith(".bias")} == {"torch.float32"}


@pytest.mark.parametrize("unused", [0, MIB, 5 * MIB, 2 * GIB, 4 * GIB, 7 * GIB, 100 * GIB])
@pytest.mark.parametrize("intermediate_size", [10_000, 10_000_000])
def test_memory_that_is_unused_makes_the_block_smaller_as_transformers_does(
    unused: int, intermediate_size: int
) -> None:
    config = config_of("llama", num_hidden_layers=1, intermediate_size=intermediate_size)
    model = loading.meta_model(loading.model_class(config), config)
    placed = dict.fromkeys((name for name, _ in model.named_parameters()), torch.device("cuda", 0))
    asked: list[int] = []

    def empty(elements: int, **_: object) -> None:
        asked.append(elements)

    with (
        mock.patch.object(torch, "empty", empty),
        mock.patch.object(torch.cuda, "mem_get_info", return_value=(200 * GIB, 200 * GIB)),
        mock.patch.object(torch.cuda, "memory_reserved", return_value=unused),
        mock.patch.object(torch.cuda, "memory_allocated", return_value=0),
        mock.patch.object(loading, "unused_bytes", return_value=unused),
    ):
        modeling_utils.caching_allocator_warmup(model, placed, None)
        loading._warm_up_allocator(model, torch.device("cuda", 0))

    assert asked[0] == asked[1]
