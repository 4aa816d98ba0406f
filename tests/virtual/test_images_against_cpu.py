"""Traces of steps on images equal the allocations of PyTorch's CPU allocator, for each family of models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from datasets import Dataset, load_from_disk
from trl import GRPOTrainer, RLOOTrainer, SFTConfig
from trl.trainer.dpo_trainer import DataCollatorForVisionPreference
from trl.trainer.kto_trainer import DataCollatorForVisionUnpairedPreference
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from autotune.core.plan import TrainingPlan
from autotune.core.program import EVALUATE
from autotune.core.rows.images import ChosenRows
from autotune.core.workload import Rollouts
from autotune.step.data.profile import layer_kinds
from autotune.step.images.tokens import image_elements
from autotune.step.models.loading import meta_model, model_class
from autotune.step.models.shrink import first_layers
from autotune.step.run.traced_training import traced_training
from autotune.step.run.virtual_trainer import TracedRows
from autotune.step.trainers import find_adapter
from autotune.trainers import find_trainer
from autotune.virtual import trace
from autotune.virtual.steps.phases import step_name
from autotune.virtual.steps.steady import steady
from tests.virtual.compared import assert_as_on_cpu
from tests.virtual.reference import run_on_cpu
from tests.vision import FAMILIES, picture, small_processor, small_vision_config

pytestmark = pytest.mark.usefixtures("small_vocabulary_tiles", "images_outside_of_torch")
LORA = {"use_peft": True, "lora_r": 8, "lora_dropout": 0.0, "lora_target_modules": "all-linear"}
STORED, CHECKPOINTED = {"gradient_checkpointing": False}, {"gradient_checkpointing": True}
WAYS: Mapping[str, tuple[Mapping[str, object], Mapping[str, object]]] = {
    "stored": (STORED, {}),
    "checkpointed": (CHECKPOINTED, {}),
    "LoRA, stored": (STORED, LORA),
    "LoRA, checkpointed": (CHECKPOINTED, LORA),
}
# The CPU's kernels of convolutions, of the backward pass of layer norms and of masked selection borrow memory, never at
# the peak. In towers as small as these, that is a larger share of all that is allocated than elsewhere.
SUM_ERROR = 0.05
BY_DAY = {
    "gemma3": "checkpointed", "gemma4": "stored", "idefics3": "stored", "llava_next": "LoRA, checkpointed",
    "qwen2_5_vl": "stored", "qwen3_vl": "LoRA, stored",
}  # fmt: skip
COMPLETED = {"max_completion_length": 6, "num_generations_eval": 2, "beta": 0.04, "pad_to_multiple_of": 8}
OWN: Mapping[str, Mapping[str, object]] = {
    "sft": {"max_length": None},
    "dpo": {"max_length": None},
    "kto": {"max_length": None},
    "grpo": {**COMPLETED, "num_generations": 2, "steps_per_generation": 1, "gradient_accumulation_steps": 2},
    # More micro-batches to a generation than a trace trains.
    "rloo": {**COMPLETED, "num_generations": 3, "steps_per_generation": 3, "gradient_accumulation_steps": 3},
}
# Widths and heights of the images of each row: one row has fewer, which some processors pad with images of zeros.
PICTURES: Sequence[Sequence[tuple[int, int]]] = ([(90, 60)], [(40, 90), (64, 64)])


@pytest.fixture
def images_outside_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's CPU allocator would count what torchvision allocates while it resizes images; a trace does not."""
    monkeypatch.setattr("tests.vision.WITH_TORCHVISION", False)


def asked(text: str) -> list[dict[str, str]]:
    """Return a prompt, to which TRL adds the images of its row."""
    return [{"role": "user", "content": text}]


def answered(text: str) -> list[dict[str, str]]:
    """Return a completion."""
    return [{"role": "assistant", "content": text}]


def with_images(*rows: Mapping[str, Any]) -> Dataset:
    """Return rows with the images of :data:`PICTURES`."""
    return Dataset.from_list(
        [{**row, "images": [picture(*size) for size in sizes]} for row, sizes in zip(rows, PICTURES, strict=True)]
    )


ROWS: Mapping[str, Callable[[], Dataset]] = {
    "sft": lambda: with_images(
        {"messages": asked("what is this model") + answered("memory of the model")},
        {"messages": asked("what") + answered("speed")},
    ),
    "dpo": lambda: with_images(
        {"prompt": asked("what is this"), "chosen": answered("a model of the memory"), "rejected": answered("a")},
        {"prompt": asked("what"), "chosen": answered("speed"), "rejected": answered("the speed of the model")},
    ),
    # The mismatched pairs are of other widths than the rows.
    "kto": lambda: with_images(
        {"prompt": asked("what is this model"), "completion": answered("a"), "label": True},
        {"prompt": asked("what"), "completion": answered("the speed of the model and its memory"), "label": False},
    ),
    **dict.fromkeys(
        ("grpo", "rloo"), lambda: with_images({"prompt": asked("what is this model")}, {"prompt": asked("what")})
    ),
}


COLLATORS = {
    "sft": DataCollatorForVisionLanguageModeling,
    "dpo": DataCollatorForVisionPreference,
    "kto": DataCollatorForVisionUnpairedPreference,
}


def tokenised(name: str, processor: Any, folder: Path) -> TracedRows:
    """Return the rows for a trainer as a workload has them, tokenised by TRL's collator, or as it tokenises prompts."""
    trainer = SimpleNamespace(train_dataset=ROWS[name](), processing_class=processor, _tokenizer=processor.tokenizer)
    if name in COLLATORS:
        trainer.data_collator, trainer.args = COLLATORS[name](processor), SFTConfig
    else:
        trainer.args, trainer.chat_template_kwargs = SimpleNamespace(remove_unused_columns=False), {}
        trainer._tokenize_prompts = partial(RLOOTrainer._tokenize_prompts, trainer)
    find_adapter(name).tokenized(trainer, Rollouts(), "rows").save_to_disk(str(folder))
    # Where rows are drawn for several micro-batches, those with the most image data come first (`whole_geometry`).
    return TracedRows([], chosen=ChosenRows(str(folder), "", (1, 0)))


def cases() -> Iterator[Any]:
    """Yield every family in each way, of which the day has one; DPO, KTO and groups are compared at night."""
    for family in FAMILIES:
        for way in WAYS:
            marks = () if BY_DAY[family] == way else pytest.mark.nightly
            yield pytest.param("sft", family, way, marks=marks, id=f"sft, {family}, {way}")
    for way in WAYS:
        yield pytest.param("dpo", "qwen2_5_vl", way, marks=pytest.mark.nightly, id=f"dpo, qwen2_5_vl, {way}")
    for family, trainer in product(FAMILIES, ("grpo", "rloo", "kto")):
        words = f"{trainer}, {family}, {BY_DAY[family]}"
        yield pytest.param(trainer, family, BY_DAY[family], marks=pytest.mark.nightly, id=words)


@pytest.mark.parametrize(("trainer", "family", "way"), list(cases()))
def test_traced_peaks_of_a_step_on_images_are_those_of_the_cpu(
    trainer: str, family: str, way: str, tmp_path: Path
) -> None:
    args, model = WAYS[way]
    shared = {"per_device_train_batch_size": 2, "bf16": False, "eval_strategy": "epoch"}
    plan = TrainingPlan(trainer, {**shared, **OWN[trainer], **args}, model, rewards=("get_soft_overlong_punishment",))
    processor = small_processor(family)
    rows = tokenised(trainer, processor, tmp_path)
    run = traced_training(plan, small_vision_config(family), processor, rows)
    assert_as_on_cpu(run, find_trainer(trainer).program(plan), sum_error=SUM_ERROR)


@pytest.mark.nightly
def test_a_step_of_one_generation_is_evaluated_on_as_many_completions_as_it_trains(tmp_path: Path) -> None:
    shared = {"per_device_train_batch_size": 4, "bf16": False, "eval_strategy": "epoch"}
    plan = TrainingPlan("grpo", {**shared, **OWN["grpo"]}, rewards=("get_soft_overlong_punishment",))
    processor = small_processor("gemma3")
    rows = replace(tokenised("grpo", processor, tmp_path), once=True)
    traced = trace(traced_training(plan, small_vision_config("gemma3"), processor, rows), target="cpu")
    assert traced.phase(EVALUATE).device_peak.bytes > traced.phase(EVALUATE).start_bytes


@pytest.mark.parametrize(("worst", "shortest"), [([], 5), ([(3, 5), (3, 6)], 5), ([(3, 6), (3, 6)], 6)])
@pytest.mark.parametrize("rows", [1, 2])
def test_the_widest_rows_are_padded_to_the_longest_completion_of_their_generation_unless_all_are_as_long(
    rows: int, worst: list[tuple[int, int]], shortest: int, tmp_path: Path
) -> None:
    sizes = {"num_generations": 2, "num_generations_eval": 1, "steps_per_generation": 2}
    args = {**sizes, "gradient_accumulation_steps": 2, "max_completion_length": 6, "eval_strategy": "epoch"}
    plan = TrainingPlan(
        "grpo",
        {**args, "per_device_train_batch_size": rows, "bf16": False},
        rewards=("get_soft_overlong_punishment",),
    )
    processor, masks = small_processor("gemma3"), list[Any]()
    made = replace(tokenised("grpo", processor, tmp_path), once=True, worst=worst)
    compute = GRPOTrainer._compute_loss

    def recorded(trainer: Any, model: Any, inputs: Any) -> Any:
        masks.append((model.training, inputs["completion_mask"].sum(1).tolist(), inputs["completion_mask"].shape[1]))
        return compute(trainer, model, inputs)

    with mock.patch.object(GRPOTrainer, "_compute_loss", recorded):
        traced_training(plan, small_vision_config("gemma3"), processor, made)(torch.device("cpu"))
    assert masks == [(True, [shortest] * rows, 6), (False, [shortest, 6][-rows:], 6)]


@pytest.mark.nightly
def test_a_step_is_traced_with_an_image_processor_that_makes_lists_of_tensors_as_with_torchvision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One generation of one step, without a reference, has all that a processor is asked for.
    args = {"per_device_train_batch_size": 2, "bf16": False, **OWN["grpo"]}
    args |= {"gradient_accumulation_steps": 1, "beta": 0.0}
    plan = TrainingPlan("grpo", args, rewards=("get_soft_overlong_punishment",))
    processor = small_processor("gemma3")
    rows = replace(tokenised("grpo", processor, tmp_path), once=True)
    run = traced_training(plan, small_vision_config("gemma3"), processor, rows)
    of_arrays = trace(run, target="cpu")
    kind = type(processor.image_processor)
    process = kind.preprocess

    def processed(*args: Any, **kwargs: Any) -> Any:
        made = process(*args, **kwargs)
        made.data = {name: [torch.as_tensor(value) for value in values] for name, values in made.items()}
        return made

    monkeypatch.setattr(kind, "preprocess", processed)
    assert trace(run, target="cpu").device_peak.bytes == of_arrays.device_peak.bytes


@pytest.mark.nightly
@pytest.mark.parametrize("micro_batches", [24, 48])
def test_images_of_two_generations_are_held_where_one_is_divided_among_many_micro_batches(
    micro_batches: int, tmp_path: Path
) -> None:
    """They are there a third time, as they were generated, which is the most that a step of 24 holds here; that of 48
    generates a second time, when gradients exist."""
    many = {"steps_per_generation": 24, "gradient_accumulation_steps": micro_batches, "num_generations": 2}
    args = {"per_device_train_batch_size": 1, "max_completion_length": 6, "bf16": False, **CHECKPOINTED, **many}
    plan = TrainingPlan("grpo", args, rewards=("get_soft_overlong_punishment",))
    processor, second = small_processor("qwen2_5_vl"), step_name(1)
    rows = tokenised("grpo", processor, tmp_path)
    once, twice = (
        traced_training(plan, small_vision_config("qwen2_5_vl"), processor, each)
        for each in (replace(rows, once=True), rows)
    )
    of_step = find_trainer("grpo").program(plan).in_step
    added = steady(trace(once, target="cpu"), step_name(0), second, further=True, of_step=of_step).phase(second)
    assert added.device_peak.bytes == pytest.approx(run_on_cpu(twice, phases=second)[second].peak_bytes, rel=0.01)


def test_images_of_two_steps_are_held_where_the_micro_batches_of_the_next_are_fetched(tmp_path: Path) -> None:
    processor = small_processor("qwen2_5_vl")
    rows = replace(tokenised("sft", processor, tmp_path), once=True)

    def held(micro_batches: int) -> int:
        sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": micro_batches}
        plan = TrainingPlan("sft", {"bf16": False, "max_length": None, **sizes})
        run = traced_training(plan, small_vision_config("qwen2_5_vl"), processor, rows)
        return trace(run, target="cuda", capability=(8, 0)).device_peak.bytes

    # All but one micro-batch of a step are left out.
    few, many = (rows.collated_bytes(2 * (count - 1), COLLATORS["sft"](processor)) for count in (40, 60))
    assert held(60) - held(40) == 2 * (many - few)


def test_a_row_that_is_left_out_is_there_with_its_tokens_and_masks(tmp_path: Path) -> None:
    processor = small_processor("qwen2_5_vl")
    rows, collate = tokenised("sft", processor, tmp_path), COLLATORS["sft"](processor)
    made = [collate([row]) for row in load_from_disk(str(tmp_path))]
    sizes = [{name: value.nbytes for name, value in each.items()} for each in made]
    assert max(each["pixel_values"] for each in sizes) < rows.collated_bytes(1, collate)
    assert rows.collated_bytes(1, collate) == sum(max(sizes, key=lambda each: each["pixel_values"]).values())


def test_rows_that_meet_by_chance_have_more_image_data_than_their_mean_and_less_than_the_largest(
    tmp_path: Path,
) -> None:
    processor = small_processor("qwen2_5_vl")
    rows, collate = tokenised("sft", processor, tmp_path), COLLATORS["sft"](processor)
    elements, largest = image_elements(load_from_disk(str(tmp_path))), rows.collated_bytes(1, collate)
    assert elements is not None
    assert 100 * elements.mean() / elements.max() < rows.collated_bytes(100, collate) / largest < 100


def test_layers_of_the_language_model_after_which_features_of_the_tower_are_added_are_of_a_kind_of_their_own() -> None:
    config = small_vision_config("qwen3_vl", layers=4)
    kinds = layer_kinds(config, meta_model(model_class(config), config))
    assert len(config.vision_config.deepstack_visual_indexes) == 2
    assert kinds[0] == kinds[1] != kinds[2] == kinds[3]


def test_fewer_layers_leave_the_tower_as_it_is() -> None:
    config = small_vision_config("gemma3", layers=4)
    fewer = first_layers(config, 2)
    assert fewer.get_text_config().num_hidden_layers == 2
    assert fewer.vision_config.to_dict() == config.vision_config.to_dict()
