"""Contract with TRL: steps and order of an epoch with generation, the divisor of the loss, and rewards."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from autotune.core.plan import Completions, TrainingPlan
from autotune.core.rows.documents import Documents
from autotune.core.rows.lengths import LengthDistribution
from autotune.core.workload import ModelSource, Rollouts
from autotune.errors import InputError
from autotune.step.data.profile import model_profile
from autotune.step.trainers.prompts import reward_function
from autotune.trainers import find_trainer
from autotune.userconfig.fields import user_plan
from autotune.userconfig.objects import configuration_of
from tests.contract.building import built
from tests.small import write_small_model
from tests.trainers.prepared import prepared_rows

SHORT, LONG = {"text": "memory is one"}, {"text": "memory is one and the batch was all that speed had of a length"}
PROMPTS = 37
FOUR = {"num_generations": 4}


@pytest.mark.parametrize(
    ("trainer", "rows", "accumulated", "fields"),
    [
        ("grpo", 4, 4, FOUR),
        ("grpo", 4, 4, {**FOUR, "steps_per_generation": 8}),
        ("grpo", 2, 3, {**FOUR, "steps_per_generation": 4}),
        ("grpo", 2, 3, {**FOUR, "steps_per_generation": 6, "num_iterations": 2}),
        ("rloo", 8, 5, {"num_generations": 8}),
        ("rloo", 4, 2, FOUR),
        ("distillation", 4, 2, {}),
    ],
    ids=str,
)
def test_an_epoch_has_the_steps_of_whole_generation_batches(
    trainer: str, rows: int, accumulated: int, fields: dict[str, Any], small_model_directory: Path, tmp_path: Path
) -> None:
    sizes: dict[str, Any] = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulated, **fields}
    prompts = [{"prompt": "memory is one"}] * PROMPTS
    made = built(trainer, small_model_directory, tmp_path, rows=prompts, max_steps=-1, num_train_epochs=1, **sizes)
    values = made.set_initial_training_values(made.args, made.get_train_dataloader())

    plan = TrainingPlan(trainer, {**sizes, "max_completion_length": 4}, completions=Completions(4.0, 4.0))
    known = find_trainer(trainer)
    geometry = known.geometry(plan, Documents.of_lengths(LengthDistribution({3: PROMPTS})))
    assert plan.steps_of_epoch(geometry.rows) == values[1]


def gradient(trainer: Any, *batches: Any) -> torch.Tensor:
    """Return the gradient of the head after a step of these micro-batches."""
    trainer.model.zero_grad()
    trainer.current_gradient_accumulation_steps = len(batches)
    collated = (trainer.data_collator([trainer.train_dataset[row] for row in rows]) for rows in batches)
    samples, items = trainer.get_batch_samples(collated, len(batches), trainer.args.device)
    for sample in samples:
        trainer.training_step(trainer.model, sample, items)
    found: torch.Tensor = trainer.model.get_output_embeddings().weight.grad
    return found.clone()


@pytest.mark.parametrize("whole", [False, True])
def test_the_tokens_of_a_step_divide_the_loss_of_models_of_which_the_profile_has_it(
    whole: bool, small_model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not whole:
        given = transformers.Qwen2_5_VLForConditionalGeneration.accepts_loss_kwargs
        monkeypatch.setattr(transformers.LlamaForCausalLM, "accepts_loss_kwargs", given, raising=False)
    trainer = built("sft", small_model_directory, tmp_path, rows=[SHORT, LONG])
    source, processor = ModelSource(str(small_model_directory)), trainer.processing_class
    profile = model_profile(source, trainer.model.config, processor, tmp_path)
    assert profile.accepts_loss_kwargs is trainer.model_accepts_loss_kwargs is whole
    together, apart = gradient(trainer, (0, 1)), gradient(trainer, (0,), (1,))
    assert torch.allclose(together, apart, rtol=1e-3, atol=1e-6) is whole


@pytest.mark.parametrize(
    ("name", "parts", "same"),
    [("sft", ((0, 1), (2,)), True), ("dpo", ((0, 1), (2, 3)), True), ("dpo", ((0, 1), (2,)), False)],
    ids=str,
)
def test_micro_batches_of_fewer_rows_weigh_as_much_where_the_loss_is_a_mean_over_rows(
    name: str, parts: tuple[tuple[int, ...], ...], same: bool, small_model_directory: Path, tmp_path: Path
) -> None:
    trainer = built(name, small_model_directory, tmp_path)
    together, apart = gradient(trainer, sum(parts, ())), gradient(trainer, *parts)
    assert torch.allclose(together, apart, rtol=1e-3, atol=1e-6) is same


@pytest.mark.parametrize("flat", [False, True])
def test_the_balance_of_experts_counts_padding_that_no_mask_marks(flat: bool, tmp_path: Path) -> None:
    model = write_small_model(tmp_path / "model", "qwen3_moe")
    fields: dict[str, Any] = {"max_length": None, "padding_free": flat, "router_aux_loss_coef": 1.0}
    sized = ({**fields, "pad_to_multiple_of": multiple} for multiple in (None, 64))
    made = (built("sft", model, tmp_path, rows=[SHORT, LONG], **each) for each in sized)
    plain, padded = (gradient(trainer, (0, 1)) for trainer in made)
    assert torch.allclose(plain, padded, rtol=1e-3, atol=1e-6) is not flat


@pytest.mark.parametrize("trainer", ["grpo", "rloo", "distillation"])
def test_trainers_that_generate_at_once_are_shuffled_by_a_switch_of_their_own(
    trainer: str, small_model_directory: Path, tmp_path: Path
) -> None:
    rows = [{"prompt": f"memory {number}"} for number in range(24)]

    def drawn(**order: Any) -> tuple[list[int], tuple[str, ...]]:
        made = built(trainer, small_model_directory, tmp_path, rows=rows, **order)
        return [*made._get_train_sampler()], user_plan(configuration_of(made.args), {}).assumptions

    usual, unsaid = drawn()
    assert unsaid == ()
    for order in ("sequential", "group_by_length", "batch_rebalance"):
        assert drawn(train_sampling_strategy=order) == (usual, ())
    in_order, (told,) = drawn(shuffle_dataset=False)
    assert in_order == sorted(usual) != usual
    assert "random order, but shuffle_dataset=False forms other micro-batches" in told


@pytest.mark.parametrize("removes", [False, True])
@pytest.mark.parametrize("trainer", ["grpo", "rloo"])
def test_reward_functions_get_no_column_that_is_removed(
    trainer: str, removes: bool, small_model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reading_rewards.py").write_text(
        "def judge(completions, solution, **_):\n    return [1.0] * len(solution)"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    rows, reading = [{"prompt": "memory", "solution": "batch"}] * 4, {"remove_unused_columns": removes}
    made = built(trainer, small_model_directory, tmp_path / "out", rows=rows, remove_unused_columns=removes)
    made.reward_funcs = [reward_function("reading_rewards.judge")]
    with pytest.raises(TypeError, match="solution") if removes else nullcontext():
        made.train()
    rollouts, refused = Rollouts(rewards=("reading_rewards.judge",)), r"removes solution, which .*judge"
    with pytest.raises(InputError, match=refused) if removes else nullcontext():
        prepared_rows(find_trainer(trainer), rows, small_model_directory, tmp_path, rollouts=rollouts, reading=reading)
