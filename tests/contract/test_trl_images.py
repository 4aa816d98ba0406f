"""Contract with TRL: its rules for rows with images are those of the catalogue and of tokenising."""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Callable, Mapping
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotune.step.data.profile import bidirectional_images, linear_modules
from autotune.step.images.tokens import image_end
from autotune.step.models.loading import meta_model, model_class
from autotune.techniques.lora import LANGUAGE_MODEL
from tests.contract.building import built
from tests.settings import plan_with, setting, workload
from tests.vision import FAMILIES, picture, small_vision_config, write_small_vision_model

Build = Callable[..., Any]
SIZES = ((90, 60), (20, 20))
ASKED, ANSWERED = {"role": "user", "content": "what is this"}, {"role": "assistant", "content": "a model"}
ROWS: Mapping[str, dict[str, Any]] = {
    "sft": {"messages": [ASKED, ANSWERED]},
    "dpo": {"prompt": [ASKED], "chosen": [ANSWERED], "rejected": [ANSWERED]},
    "kto": {"prompt": [ASKED], "completion": [ANSWERED], "label": True},
    "grpo": {"prompt": [ASKED]},
    "rloo": {"prompt": [ASKED]},
}
COMPLETED = {"prompt": [ASKED], "completion": [ANSWERED]}


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_vision_model(tmp_path_factory.mktemp("vision"), "gemma3")


@pytest.fixture
def build(vision_model: Path, tmp_path: Path) -> Build:
    def on_images(name: str = "sft", row: dict[str, Any] | list[dict[str, Any]] | None = None, **fields: Any) -> Any:
        every = row if isinstance(row, list) else [row or ROWS[name]] * len(SIZES)
        rows = [
            {**each, "images": each.get("images", [picture(*size)] * count)}
            for each, (count, size) in zip(every, cycle(enumerate(SIZES, start=1)), strict=False)
        ]
        return built(name, vision_model, tmp_path, rows=rows, **fields)

    return on_images


def batch_of(trainer: Any) -> Any:
    return next(iter(trainer.get_train_dataloader()))


GROUPS = {"num_generations": 2, "max_completion_length": 4, "gradient_accumulation_steps": 2}
BATCHED = {"use_transformers_continuous_batching": True, **GROUPS}


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("sft", {"packing": True}, "Packing is not supported for vision datasets"),
        ("sft", {"padding_free": True, "max_length": None}, "Padding-free training is yet not supported for vision"),
        *((name, {"truncation_mode": "keep_end"}, "'keep_end' is not supported for vision") for name in ("sft", "dpo")),
        *(
            (name, {"precompute_ref_log_probs": True}, "`precompute_ref_log_probs=True` is not supported for vision")
            for name in ("dpo", "kto")
        ),
        ("kto", {"row": ROWS["dpo"]}, "Vision datasets must be in unpaired format"),
        *((name, BATCHED, "does not support multimodal models") for name in ("grpo", "rloo")),
    ],
)
def test_what_images_do_not_go_with_is_refused(build: Build, name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(name, **fields)


@pytest.mark.parametrize("name", ["sft", "dpo", "kto"])
@pytest.mark.parametrize("max_length", [None, 1])
def test_no_row_is_dropped(build: Build, name: str, max_length: int | None) -> None:
    assert len(build(name, max_length=max_length).train_dataset) == len(SIZES)


@pytest.mark.parametrize("evaluated", [False, True])
def test_answers_are_exchanged_by_kto_within_each_micro_batch_of_its_own_size(build: Build, evaluated: bool) -> None:
    rows = [{**ROWS["kto"], "completion": [{**ANSWERED, "content": "model " * count}]} for count in range(1, 7)]
    trainer = build("kto", rows, per_device_train_batch_size=2, per_device_eval_batch_size=3)
    batches = list(trainer.get_eval_dataloader(trainer.train_dataset) if evaluated else trainer.get_train_dataloader())
    assert [len(batch["label"]) for batch in batches] == ([3, 3] if evaluated else [2, 2, 2])
    for batch in batches:
        own, mismatched = (
            [row[mask.bool()].tolist() for row, mask in zip(ids, batch[f"{prefix}completion_mask"], strict=True)]
            for prefix, ids in (("", batch["input_ids"]), ("KL_", batch["KL_input_ids"]))
        )
        assert mismatched == [own[-1], *own[:-1]]


def test_no_answers_are_exchanged_by_kto_without_a_kl_divergence(build: Build) -> None:
    assert "KL_input_ids" not in batch_of(build("kto", loss_type="apo_zero_unpaired"))


@pytest.mark.parametrize("name", ["sft", "dpo", "kto"])
@pytest.mark.parametrize("family", ["gemma3", "idefics3", "llava_next"])
def test_a_length_that_cuts_tokens_after_the_last_one_of_an_image_trains_and_a_shorter_one_fails(
    name: str, family: str, tmp_path: Path
) -> None:
    model = write_small_vision_model(tmp_path / "model", family)
    rows = [{**ROWS[name], "images": [picture(90, 60)]}] * 2

    def trained(max_length: int | None) -> Any:
        trainer = built(name, model, tmp_path, rows=rows, max_length=max_length, per_device_train_batch_size=2)
        batch = batch_of(trainer)
        trainer.compute_loss(trainer.model, batch)
        return trainer, batch["input_ids"][0].tolist()

    trainer, ids = trained(None)
    end = image_end(ids, trainer.processing_class)
    assert len(trained(end)[1]) == end < len(ids)
    (of_images,) = trainer.processing_class.image_token_ids
    with pytest.raises((ValueError, TypeError)):
        trained(len(ids) - 1 - ids[::-1].index(of_images))


def test_no_row_is_tokenised_before_its_micro_batch(build: Build) -> None:
    trainer = build()
    assert trainer.train_dataset.column_names == ["messages", "images"]
    assert {"input_ids", "labels", "pixel_values"} <= set(batch_of(trainer))


def test_rows_are_rounded_up_where_they_are_messages_alone(build: Build) -> None:
    assert batch_of(build(pad_to_multiple_of=64))["input_ids"].shape[1] == 64
    for trainer in (build(row=COMPLETED, pad_to_multiple_of=64), build("kto", pad_to_multiple_of=64)):
        with pytest.raises(NotImplementedError, match="not yet implemented for vision-language"):
            batch_of(trainer)


def test_rows_are_not_rounded_up_where_the_maximum_length_is_no_multiple(build: Build) -> None:
    assert batch_of(build(pad_to_multiple_of=64, max_length=128))["input_ids"].shape[1] == 64
    with pytest.raises(ValueError, match="is not a multiple of pad_to_multiple_of"):
        batch_of(build(pad_to_multiple_of=64, max_length=100))


def test_a_column_of_text_is_left_out_so_that_such_rows_fail_unless_all_columns_are_kept(build: Build) -> None:
    rows = [{"text": f"{'<start_of_image>' * count} a model"} for count in (1, 2)]
    with pytest.raises(KeyError, match="Unexpected input keys"):
        batch_of(build(row=rows))
    # A column of text comes before prompts and completions.
    kept = {"remove_unused_columns": False, "train_sampling_strategy": "sequential"}
    both = batch_of(build(row=[{**row, **COMPLETED} for row in rows], completion_only_loss=False, **kept))
    assert both["input_ids"].tolist() == batch_of(build(row=rows, **kept))["input_ids"].tolist()


def test_columns_of_tokens_do_not_change_what_is_trained_on(build: Build) -> None:
    plain = batch_of(build())
    added = batch_of(build(row={**ROWS["sft"], "input_ids": [1], "labels": [1]}))
    assert added.keys() == plain.keys()
    assert added["input_ids"].tolist() == plain["input_ids"].tolist()


def test_bytes_are_no_images_and_a_path_is(build: Build, tmp_path: Path) -> None:
    picture(9, 9).save(tmp_path / "a.png")
    trainer = build()
    with pytest.raises(TypeError, match="only a single or a list of entries is supported"):
        trainer.data_collator([{**ROWS["sft"], "images": [b"png"]}])
    # A path is opened, but only where the training was started from the folder that it is relative to.
    assert trainer.data_collator([{**ROWS["sft"], "images": [str(tmp_path / "a.png")]}])["pixel_values"].shape[0] == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_lora_trains_the_tower_unless_the_modules_that_the_documentation_names_are_excluded(family: str) -> None:
    from peft import get_peft_config, get_peft_model
    from transformers import AutoModelForImageTextToText

    text = (Path(__file__).parents[2] / "docs" / "images.md").read_text(encoding="utf-8")
    documented = json.loads(text.partition("```json\n")[2].partition("```")[0])

    def trained(**changes: None) -> set[bool]:
        with torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(small_vision_config(family))
        adapted = get_peft_model(model, get_peft_config({**documented, **changes}))
        names = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
        return {"language_model" in name or "text_model" in name for name in names}

    assert trained(exclude_modules=None) == {True, False}
    assert trained() == {True}


@pytest.mark.parametrize("family", FAMILIES)
def test_lora_on_the_language_model_adapts_each_of_its_layers_and_nothing_of_the_tower(family: str) -> None:
    from peft import LoraConfig, get_peft_model

    config = small_vision_config(family)
    model = meta_model(model_class(config), config)
    of = workload(language_modules=linear_modules(model, LANGUAGE_MODEL))
    targets = plan_with(setting(of=of), {"lora": "r16-language"}).model["lora_target_modules"]
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and re.search(r"(language|text)_model\.layers\.", name)
    ]
    adapted = get_peft_model(model, LoraConfig(target_modules=targets)).targeted_module_names
    assert sorted(adapted) == sorted(linear) != []


def test_the_micro_batches_of_a_step_are_held_until_all_of_the_next_are_there(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = build("sft", [ROWS["sft"]] * 4, gradient_accumulation_steps=1)
    held: list[Any] = []
    still: list[list[bool]] = []
    fetch = trainer.get_batch_samples

    def fetched(*args: Any, **kwargs: Any) -> Any:
        found = fetch(*args, **kwargs)
        still.append([reference() is not None for reference in held])
        held[:] = [weakref.ref(batch["pixel_values"]) for batch in found[0]]
        return found

    monkeypatch.setattr(trainer, "get_batch_samples", fetched)
    trainer.train()
    assert still == [[], [True]]


def future(mask_function: Callable[..., Any], tokens: int) -> bool:
    """Return whether a mask lets any token attend to the next one."""
    none, places = torch.tensor(0), torch.arange(tokens - 1)
    return any(bool(mask_function(none, none, place, place + 1)) for place in places)


@pytest.mark.parametrize("family", ["gemma3", "idefics3", "llava_next"])
def test_tokens_of_an_image_attend_to_later_ones_where_the_profile_has_that_and_flash_attention_ignores_it(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask

    rows = [{**ROWS["sft"], "images": [picture(90, 60)]}]
    trainer = built("sft", write_small_vision_model(tmp_path / "model", family), tmp_path, rows=rows)
    of_sdpa, seen, flash, batch = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"], [], [], batch_of(trainer)

    def mask(**asked: Any) -> Any:
        # A tower's mask is of patches.
        if asked["q_length"] == batch["input_ids"].shape[1]:
            seen.append(future(asked["mask_function"], asked["q_length"]))
            flash.append(flash_attention_mask(**asked))
        return of_sdpa(**asked)

    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS, "sdpa", mask)
    trainer.model(**batch)
    text = trainer.model.config.get_text_config()
    assert any(seen) is bidirectional_images(type(trainer.model), text)
    assert flash.count(None) == len(flash) > 0


@pytest.mark.parametrize(
    ("name", "asked", "expected"),
    [
        ("PaliGemmaForConditionalGeneration", None, True),
        ("Gemma4ForConditionalGeneration", None, False),
        ("Gemma4ForConditionalGeneration", "vision", True),
    ],
)
def test_models_of_other_families_add_blocks_of_images_to_the_mask(
    name: str, asked: str | None, expected: bool
) -> None:
    import transformers

    known = getattr(transformers, name)
    assert bidirectional_images(known, SimpleNamespace(use_bidirectional_attention=asked)) is expected


def test_context_parallelism_splits_tokens_and_no_images(build: Build) -> None:
    trainer = build()
    batch = batch_of(trainer)
    split: list[Any] = []
    trainer.accelerator = SimpleNamespace(
        parallelism_config=SimpleNamespace(cp_enabled=True, cp_backend="torch"),
        maybe_context_parallel=lambda buffers, **_: split.extend(buffers),
    )
    trainer._prepare_context_parallel_inputs(trainer.model, batch)[0]()
    assert any(buffer is batch["input_ids"] for buffer in split)
    assert not any(buffer is batch["pixel_values"] for buffer in split)


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_completions_need_a_prompt_of_messages(build: Build, name: str) -> None:
    trainer = build(name, {"prompt": "what is this"}, **GROUPS)
    with pytest.raises(ValueError, match="Multimodal training requires conversational prompts"):
        trainer._prepare_inputs(batch_of(trainer))


def test_grpo_cannot_generate_for_prompts_with_and_without_images_together(build: Build) -> None:
    trainer = build("grpo", [ROWS["grpo"], {**ROWS["grpo"], "images": []}], **GROUPS)
    with pytest.raises(TypeError, match="only a single or a list of entries"):
        trainer._prepare_inputs(batch_of(trainer))


def test_rloo_generates_for_prompts_with_and_without_images_together(build: Build) -> None:
    trainer = build("rloo", [ROWS["rloo"], {**ROWS["rloo"], "images": []}], **GROUPS)
    assert trainer._prepare_inputs(batch_of(trainer))["completion_ids"].shape == (4, 4)


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_pixels_of_all_completions_of_a_generation_are_held_by_its_micro_batches(build: Build, name: str) -> None:
    trainer = build(name, pad_to_multiple_of=16, **GROUPS)
    trainer.model.train()
    first = trainer._prepare_inputs(batch_of(trainer))
    assert sum(batch["pixel_values"].shape[0] for batch in trainer._buffered_inputs) == 6
    assert first["prompt_ids"].shape[1] % 16 == first["completion_ids"].shape[1] % 16 == 0
    assert first["token_type_ids"].shape[1] == first["prompt_ids"].shape[1] + first["completion_ids"].shape[1]


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_which_completions_share_a_micro_batch_is_drawn(
    build: Build, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = build(name, **GROUPS)
    trainer.model.train()
    rows = batch_of(trainer)
    monkeypatch.setattr(torch, "randperm", lambda count: torch.arange(count).flip(0))
    first = trainer._prepare_inputs(rows)["prompt_ids"].tolist()
    assert first == trainer._generate_and_score_completions(rows)["prompt_ids"].flip(0)[:2].tolist()
    assert first != trainer._generate_and_score_completions(rows)["prompt_ids"][:2].tolist()
