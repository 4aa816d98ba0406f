"""The self-test distinguishes architectures that keep packed documents apart from those that mix them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, Gemma2PreTrainedModel, LlamaForCausalLM

from autotune.core.jobs.protocol import CheckPackingRequest
from autotune.core.workload import ModelSource, PackingCheck
from autotune.emit.document import json_text
from autotune.errors import InputError
from autotune.probing import JobServer, check_packing
from autotune.step.jobs.check_packing import _check
from autotune.step.models.shrink import shrunken_model
from tests.small import small_config, write_small_model


def check(
    server: JobServer, folder: Path, model_type: str, *attentions: str, **changes: Any
) -> tuple[PackingCheck, ...]:
    model = write_small_model(folder / model_type, model_type, weights=False, tokenizer=False, **changes)
    request = CheckPackingRequest("sft", ModelSource(str(model)), "cpu", attentions)
    checks = check_packing(server, request, folder / "check")
    assert tuple(found.attention for found in checks) == attentions
    return checks


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "mistral", "gpt2", "qwen3_moe"])
def test_these_keep_packed_documents_apart(job_server: JobServer, tmp_path: Path, model_type: str) -> None:
    for found in check(job_server, tmp_path, model_type, "sdpa", "eager"):
        assert found.supported, found
        assert found.separates, found
        assert found.max_difference is not None
        assert found.max_difference < found.tolerance
        assert found.reason == ""


@pytest.mark.parametrize("model_type", ["opt", "gpt_oss"])
def test_these_mix_packed_documents(job_server: JobServer, tmp_path: Path, model_type: str) -> None:
    (found,) = check(job_server, tmp_path, model_type, "eager")
    assert found.supported
    assert not found.separates
    assert found.max_difference is not None
    assert found.max_difference > 100 * found.tolerance
    assert found.reason == f"packed and separate logits differ by up to {found.max_difference:.3g}"


def test_a_model_without_finite_logits_has_a_check_that_can_be_written_as_json(
    job_server: JobServer, tmp_path: Path
) -> None:
    # The norm of a row is the root of a negative number.
    (found,) = check(job_server, tmp_path, "llama", "eager", rms_norm_eps=-10.0)
    assert (found.supported, found.separates) == (True, False)
    assert found.reason == "documents give logits that are not finite"
    json_text(found)


def test_an_attention_that_the_architecture_or_the_machine_lacks_is_not_supported(
    job_server: JobServer, tmp_path: Path
) -> None:
    if Gemma2PreTrainedModel._supports_sdpa:
        pytest.skip("this release of transformers has sdpa for Gemma 2")
    sdpa, eager, flash = check(job_server, tmp_path, "gemma2", "sdpa", "eager", "flash_attention_2")
    assert not sdpa.supported
    assert not sdpa.separates
    assert "does not support an attention implementation" in sdpa.reason
    assert sdpa.max_difference is None
    assert eager.supported
    assert eager.separates
    assert not flash.supported


def test_a_model_that_cannot_be_read_is_told(job_server: JobServer, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    request = CheckPackingRequest("sft", ModelSource(str(tmp_path / "empty")), "cpu", ("sdpa",))
    with pytest.raises(InputError, match="cannot be loaded"):
        check_packing(job_server, request, tmp_path / "check")


# Full-size configurations of transformers' defaults: 7B and 8x7B parameters, 16 experts with chunked attention, ….
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gemma3_text", "mixtral", "deepseek_v3", "llama4_text"])
def test_a_shrunken_copy_is_small_and_has_every_kind_of_layer(model_type: str) -> None:
    config = AutoConfig.for_model(model_type)
    architecture = AutoModelForCausalLM._model_mapping[type(config)]
    model = shrunken_model(architecture, config, layers=2)
    assert type(model) is architecture
    assert sum(parameter.numel() for parameter in model.parameters()) < 10_000_000
    assert set(getattr(model.config, "layer_types", None) or []) == set(getattr(config, "layer_types", None) or [])
    assert config.num_hidden_layers > 2, "the configuration that was given is left as it was"


def test_an_attention_that_transformers_replaces_is_not_supported() -> None:
    # As gpt_oss, whose class is compatible with some FlashAttentions alone.
    class Replacing(LlamaForCausalLM):
        def _check_and_adjust_attn_implementation(self, *_: Any, **__: Any) -> str:
            return "eager"

    found = _check(Replacing, small_config("llama"), "sdpa", "cpu", packs=True)
    assert not found.supported
    assert found.reason == "transformers silently takes eager instead"
