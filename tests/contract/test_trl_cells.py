"""Contract with TRL: where a trainer ignores or refuses what its configuration takes, by running each.

The catalogue says the same (``TrainerFacts`` of a technique); ``docs/techniques.md`` shows it.
"""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from autotune.core.candidate import Candidate
from autotune.techniques import find
from autotune.techniques.base import facts
from autotune.techniques.gradient_checkpointing import GradientCheckpointing
from autotune.trainers import techniques_of, trainers
from tests.contract.building import NAMES, built
from tests.settings import GPU, setting

KEYS: dict[str, dict[str, object]] = {
    "every_2": {"every_n_layers": 2},
    "selective": {"selective": True},
    "offload": {"offload": True},
}
REFUSING = r"Unexpected keyword arguments: (every_n_layers|selective|offload)"


def known(trainer: str, choice: str) -> str:
    """Return what the catalogue says of a way to checkpoint: refused, ignored, restricted or taken."""
    own = facts(GradientCheckpointing, trainer)
    sets = {"refused": own.refused, "ignored": own.ignored, "restricted": own.restricted}
    return next((word for word, found in sets.items() if choice in found), "taken")


def checkpointed_layers(trainer: Any) -> list[list[bool]]:
    """Train, and return which layers are checkpointed at each backward pass."""
    seen: list[list[bool]] = []
    backward = trainer.accelerator.backward

    def noting(*args: Any, **kwargs: Any) -> Any:
        layers = trainer.accelerator.unwrap_model(trainer.model).model.layers
        seen.append([layer.gradient_checkpointing for layer in layers])
        return backward(*args, **kwargs)

    trainer.accelerator.backward = noting
    trainer.train()
    return seen


@pytest.mark.parametrize("name", NAMES)
def test_every_second_layer_is_checkpointed_where_the_catalogue_says_so(
    small_model_directory: Path, tmp_path: Path, name: str
) -> None:
    trainer = built(name, small_model_directory, tmp_path, gradient_checkpointing_kwargs=KEYS["every_2"])
    match known(name, "every_2"):
        case "taken":
            assert all(layers == [True, False] for layers in checkpointed_layers(trainer))
        case "ignored":
            assert all(layers == [True, True] for layers in checkpointed_layers(trainer))
        case _:
            with pytest.raises(ValueError, match=REFUSING):
                trainer.train()


@pytest.mark.parametrize("name", [name for name in NAMES if known(name, "every_2") == "restricted"])
def test_a_precomputed_reference_lifts_the_restriction(small_model_directory: Path, tmp_path: Path, name: str) -> None:
    fields = {"precompute_ref_log_probs": True, "gradient_checkpointing_kwargs": KEYS["every_2"]}
    trainer = built(name, small_model_directory, tmp_path, **fields)
    assert all(layers == [True, False] for layers in checkpointed_layers(trainer))


@pytest.mark.parametrize("name", NAMES)
def test_attention_outputs_are_kept_where_the_catalogue_says_so(
    small_model_directory: Path, tmp_path: Path, name: str
) -> None:
    trainer = built(name, small_model_directory, tmp_path, gradient_checkpointing_kwargs=KEYS["selective"])
    if known(name, "selective") == "refused":
        with pytest.raises(ValueError, match=REFUSING):
            trainer.train()
    else:
        trainer.train()
        functions = [
            layer._gradient_checkpointing_func.keywords
            for layer in trainer.accelerator.unwrap_model(trainer.model).model.layers
        ]
        ignored = known(name, "selective") == "ignored"
        assert all(("context_fn" in keywords) is not ignored for keywords in functions)


@pytest.mark.parametrize("name", ["grpo", "rloo", "online_dpo", "distillation"])
def test_trainers_that_generate_do_not_offload_what_is_checkpointed(
    small_model_directory: Path, tmp_path: Path, name: str
) -> None:
    trainer = built(name, small_model_directory, tmp_path, gradient_checkpointing_kwargs=KEYS["offload"])
    if known(name, "offload") == "refused":
        with pytest.raises(ValueError, match=REFUSING):
            trainer.train()
    else:
        # On a CPU, offloading fails for lack of pinned memory: nothing is offloaded.
        assert known(name, "offload") == "ignored"
        trainer.train()


def test_dpo_turns_padding_free_off(
    small_model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trl.trainer import dpo_trainer

    warned: list[str] = []
    monkeypatch.setattr(dpo_trainer.logger, "warning", warned.append)
    assert not built("dpo", small_model_directory, tmp_path, padding_free=True).padding_free
    assert any(re.search("padding_free", text) for text in warned)
    assert facts(find("padding_free", techniques_of(trainers()["sft"])), "dpo").without_effect


def test_continuous_batching_has_no_use_for_the_paged_attention_of_the_hub() -> None:
    from transformers.utils.generic import is_flash_attention_requested

    # What is neither flash, sdpa nor paged|eager is refused (ContinuousBatchingManager.switch_to_cb_friendly_attn).
    assert not is_flash_attention_requested(requested_attention_implementation="kernels-community/paged-attention")
    assert is_flash_attention_requested(requested_attention_implementation="kernels-community/flash-attn2")


@pytest.mark.parametrize(("bf16", "dtype"), [(True, "torch.bfloat16"), (False, "torch.float32")])
def test_continuous_batching_casts_the_trained_weights_for_good_under_autocast(
    small_model_directory: Path, tmp_path: Path, bf16: bool, dtype: str
) -> None:
    # Ten blocks: the cache would take most of this machine's memory.
    cache = {"num_blocks": 10, "max_batch_tokens": 32}
    fields: dict[str, Any] = {"use_transformers_continuous_batching": True, "bf16": bf16, "max_steps": 1}
    trainer = built("grpo", small_model_directory, tmp_path, **fields, transformers_continuous_batching_config=cache)
    machine = replace(GPU, packages={"transformers": version("transformers")})
    chosen = Candidate({"precision": "float32+bf16" if bf16 else "float32"})
    if find("continuous_batching", trainers()["grpo"].techniques).conflict("on", chosen, setting(machine=machine)):
        # Each request fails, and TRL looks for its last token.
        with pytest.raises(IndexError):
            trainer.train()
        return
    trainer.train()
    assert {str(parameter.dtype) for parameter in trainer.model.parameters()} == {dtype}
