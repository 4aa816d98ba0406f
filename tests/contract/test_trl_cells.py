"""Contract with TRL: the exceptions of each trainer in the catalogue, checked by running the trainer.

The catalogue declares them (``TrainerFacts`` of a technique), and ``docs/techniques.md`` lists them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.core.candidate import Candidate
from autotune.techniques import find
from autotune.techniques.base import Technique, facts
from autotune.techniques.gradient_checkpointing import GradientCheckpointing
from autotune.techniques.per_device_train_batch_size import ROWS
from autotune.trainers import find_trainer, trainers
from tests.contract.building import built
from tests.settings import GPU, setting, workload

KEYS: dict[str, dict[str, object]] = {
    "every_2": {"every_n_layers": 2},
    "selective": {"selective": True},
    "offload": {"offload": True},
}
REFUSING = r"Unexpected keyword arguments: (every_n_layers|selective|offload)"


def known(trainer: str, choice: str) -> str:
    """Return the catalogue's word for a kind of checkpointing: refused, ignored, restricted or taken."""
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


@pytest.mark.parametrize("name", trainers())
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


@pytest.mark.parametrize("name", [name for name in trainers() if known(name, "every_2") == "restricted"])
def test_a_precomputed_reference_lifts_the_restriction(small_model_directory: Path, tmp_path: Path, name: str) -> None:
    fields: dict[str, Any] = {"precompute_ref_log_probs": True, "gradient_checkpointing_kwargs": KEYS["every_2"]}
    trainer = built(name, small_model_directory, tmp_path, **fields)
    found = checkpointed_layers(trainer)
    assert found
    assert all(layers == [True, False] for layers in found)


@pytest.mark.parametrize("name", trainers())
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
    assert facts(find("padding_free", trainers()["sft"].techniques), "dpo").without_effect


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


Build = Callable[..., Any]
LORA = {"use_peft": True, "lora_r": 4, "lora_target_modules": "all-linear"}


@pytest.fixture
def build_reward(small_model_directory: Path, tmp_path: Path) -> Build:
    """Return a function that makes a ``RewardTrainer`` on a small model from configuration fields."""
    rows = [{"chosen_ids": [5] * 9, "rejected_ids": [5] * 3}, {"chosen_ids": [6] * 4, "rejected_ids": [6] * 7}]
    return partial(built, "reward", small_model_directory, tmp_path, rows=rows, max_steps=1)


def test_adapters_need_the_task_of_a_model_that_scores(build_reward: Build) -> None:
    with pytest.raises(AttributeError, match="prepare_inputs_for_generation"):
        build_reward(words=LORA)
    trainer = build_reward(words={**LORA, "lora_task_type": "SEQ_CLS"})
    trained = [name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad]
    assert [name for name in trained if "score" in name] == ["base_model.model.score.modules_to_save.default.weight"]


def test_liger_s_fused_loss_makes_a_language_model_of_it(build_reward: Build) -> None:
    pytest.importorskip("liger_kernel")
    # Its kernels need a GPU; with the fused loss alone, only the model's forward is replaced.
    none = {"rope": False, "rms_norm": False, "swiglu": False}
    with pytest.raises(AttributeError, match="lm_head"):
        build_reward(use_liger_kernel=True, liger_kernel_config=none).train()
    build_reward(use_liger_kernel=True, liger_kernel_config={**none, "fused_linear_cross_entropy": False}).train()


def test_a_dataset_of_which_every_row_is_dropped_is_not_trained_on(build_reward: Build) -> None:
    with pytest.raises(ValueError, match="num_samples=0"):
        build_reward(max_length=3).train()


@pytest.mark.parametrize("technique", find_trainer("reward").techniques, ids=lambda item: item.name)
def test_every_choice_of_reward_models_is_taken_by_their_configuration_with_the_task_of_adapters(
    technique: Technique, tmp_path: Path
) -> None:
    import trl

    reward, here = find_trainer("reward"), setting(machine=GPU)
    baseline = reward.defaults(here)
    for option in technique.options:
        plan = reward.plan(baseline.but(**{technique.name: technique.parse(option.choice, here)}), here)
        trl.RewardConfig(str(tmp_path), use_cpu=True, **plan.args)
        model = trl.ModelConfig(**plan.model)
        assert not model.use_peft or model.lora_task_type == "SEQ_CLS"
        fused = {"fused_linear_cross_entropy": False}
        assert plan.args.get("liger_kernel_config") == (fused if plan.args["use_liger_kernel"] else None)


TOKENS = 8


def forward_of_a_step(trainer: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Train, and return the first pass: what the model saw, its logits, the completions and their log-probabilities."""
    seen: list[Any] = []
    forward = trainer._forward

    def noting(model: Any, prompt: Any, prompt_mask: Any, completion: Any, *args: Any, **kwargs: Any) -> Any:
        outputs: list[Any] = []
        hook = model.register_forward_hook(lambda _, given, output: outputs.append((given[0], output.logits)))
        scores = forward(model, prompt, prompt_mask, completion, *args, **kwargs)
        hook.remove()
        seen.append((*outputs[0], completion, scores))
        return scores

    trainer._forward = noting
    trainer.train()
    return seen[0]  # type: ignore[no-any-return]  # what was noted above


def online(model: Path, folder: Path, max_length: int) -> Any:
    """Return a trainer of online DPO whose completions have as many tokens as they may have."""
    words = {"min_new_tokens": TOKENS}
    return built("online_dpo", model, folder, generation_kwargs=words, max_length=max_length, max_new_tokens=TOKENS)


@pytest.mark.parametrize("max_length", [TOKENS // 2, TOKENS])
def test_whole_completions_are_scored_without_prompts_by_logits_that_have_seen_them(
    max_length: int, small_model_directory: Path, tmp_path: Path
) -> None:
    tokens, logits, completions, scores = forward_of_a_step(online(small_model_directory, tmp_path, max_length))
    assert tokens.tolist() == completions.tolist()
    assert completions.shape[1] == TOKENS
    unshifted = logits.log_softmax(-1).gather(2, completions.unsqueeze(-1)).squeeze(-1)
    assert torch.equal(scores, unshifted)
    said = spoilt(max_length)
    assert said is not None
    assert "without their prompts" in said


def test_a_prompt_that_has_room_is_scored_before_its_completion(small_model_directory: Path, tmp_path: Path) -> None:
    tokens, logits, completions, scores = forward_of_a_step(online(small_model_directory, tmp_path, TOKENS + 1))
    assert tokens[:, 1:].tolist() == completions.tolist()
    shifted = logits[:, :-1].log_softmax(-1).gather(2, completions.unsqueeze(-1)).squeeze(-1)
    assert torch.equal(scores, shifted)
    assert spoilt(TOKENS + 1) is None


def spoilt(max_length: int) -> str | None:
    known, here = find_trainer("online_dpo"), setting(of=workload(trainer="online_dpo"))
    baseline = known.defaults(here)
    return known.unintended(baseline.but(max_length=max_length, max_new_tokens=TOKENS), here)


def test_online_dpo_adds_up_the_losses_of_micro_batches(small_model_directory: Path, tmp_path: Path) -> None:
    """What counts is divided by their number only in what is logged; without DeepSpeed, so is no gradient."""
    trainer = built("online_dpo", small_model_directory, tmp_path, gradient_accumulation_steps=2, max_steps=1)
    seen: list[tuple[float, float]] = []
    backward, step = trainer.accelerator.backward, trainer.training_step

    def noted(loss: torch.Tensor, **words: Any) -> None:
        seen.append((loss.item(), trainer.accelerator.gradient_accumulation_steps))
        backward(loss, **words)

    def logged(*args: Any) -> Any:
        found = step(*args)
        assert found.item() == pytest.approx(seen[-1][0] / 2)
        return found

    trainer.accelerator.backward, trainer.training_step = noted, logged
    trainer.train()
    assert [steps for _, steps in seen] == [1, 1]
    assert ROWS in find_trainer("online_dpo").loss_depends_on({})
