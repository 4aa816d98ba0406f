"""The table of legacy keys has every field that a release of TRL removed, each with a remedy."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from autotune.inspection.legacy import SHARED, legacy_of, table
from tests.inspection.released import RECORDED, TRAINERS, removed

ALLOWED = {"gone", "since", "never", "no_effect", "write", "by_hand", "note", "same", "values"}


def rows() -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield section, key and row of the whole table."""
    for section, keys in table().items():
        for key, row in keys.items():
            yield section, key, row


def states() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield every state that the table gives to a key or to a value of a key."""
    for section, key, row in rows():
        if {"gone", "since", "never"} & row.keys():
            yield f"{section}.{key}", row
        for value, more in row.get("values", {}).items():
            yield f"{section}.{key}={value}", {**{name: row[name] for name in row if name != "values"}, **more}


def test_every_field_that_a_release_lost_is_in_the_table() -> None:
    for section, field, gone in removed():
        found = legacy_of(section if section in TRAINERS else "sft", field, "a value")
        assert found is not None, (section, field)
        assert found.gone == gone, (section, field)
        assert found.library == ("transformers" if section == "transformers" else "TRL"), (section, field)


def test_the_table_says_of_no_field_that_it_went_which_no_release_had() -> None:
    went = {(section, key) for section, key, row in rows() if "gone" in row}
    assert went <= {(section, field) for section, field, _ in removed()}


def test_the_table_says_never_only_of_what_no_release_had() -> None:
    never = {(section, key) for section, key, row in rows() if "never" in row}
    had = {(section, field) for section, fields in RECORDED["fields"].items() for field in fields}
    assert never.isdisjoint(had)
    # Sections of all trainers are about every class.
    assert {key for section, key in never if section in SHARED}.isdisjoint(field for _, field in had)


def test_every_row_says_one_thing_in_the_words_of_the_table() -> None:
    for name, row in states():
        assert row.keys() <= ALLOWED, name
        assert len({"gone", "since", "never"} & row.keys()) == 1, name
        assert all(re.fullmatch(r"\d+\.\d+\.\d+", row[state]) for state in ("gone", "since") if state in row), name
        assert not (row.get("write") and row.get("by_hand")), f"{name}: what a person has to decide is not written"
        assert row.get("note", "x.").endswith("."), f"{name}: a note is a sentence"
        assert row.get("note") or not row.get("by_hand"), f"{name}: a person who has to decide is told between what"


@pytest.mark.parametrize(
    ("trainer", "key", "value", "said"),
    [
        ("sft", "max_seq_length", 4096, "was removed in TRL 0.20.0: write max_length: 4096."),
        ("sft", "max_seq_length", None, "was removed in TRL 0.20.0: leave it out, which has the same effect as null."),
        ("kto", "label_pad_token_id", -100, "was removed in TRL 0.28.0 without a replacement: leave it out."),
        (
            "dpo",
            "rpo_alpha",
            0.5,
            "was removed in TRL 0.29.0: write loss_type: [sigmoid, sft], loss_weights: [1.0, 0.5].",
        ),
        ("reward", "warmup_ratio", 0.1, "was removed in transformers 5.15.0: write warmup_steps: 0.1."),
        ("sft", "warmup_ratio", 1.0, "was removed in transformers 5.15.0."),
        ("sft", "torch_dtype", "bfloat16", "was removed in TRL 0.27.0: write dtype: bfloat16."),
        ("sft", "torch_dtype", "bf16", "was removed in TRL 0.27.0: write dtype: bfloat16."),
    ],
)
def test_a_key_that_went_is_said_in_a_sentence(trainer: str, key: str, value: object, said: str) -> None:
    found = legacy_of(trainer, key, value)
    assert found is not None
    assert found.sentence() == f"{key} {said} {found.note}".strip()


@pytest.mark.parametrize(
    ("trainer", "key", "value", "said"),
    [
        (
            "sft",
            "packing_strategy",
            "ffd",
            "packing_strategy: ffd was removed in TRL 0.20.0: write packing_strategy: bfd.",
        ),
        (
            "sft",
            "loss_type",
            "chunked_nll",
            "loss_type: chunked_nll is deprecated since TRL 1.15.0: write loss_type: nll.",
        ),
        ("dpo", "padding_free", True, "padding_free: true has no effect since TRL 0.29.0: leave it out."),
        (
            "grpo",
            "vllm_sleep_enabled",
            1,
            "No release of TRL has had vllm_sleep_enabled for this trainer: write vllm_enable_sleep_mode: 1.",
        ),
        ("reward", "num_labels", 1, "No release of TRL has had num_labels: leave it out."),
        (
            "reward",
            "use_liger",
            True,
            "No release of TRL has had use_liger for this trainer: write use_liger_kernel: true.",
        ),
        (
            "sft",
            "bnb_4bit_use_double_quant",
            True,
            "No release of TRL has had bnb_4bit_use_double_quant: write use_bnb_nested_quant: true.",
        ),
    ],
)
def test_a_value_that_went_and_what_never_was_are_said_in_a_sentence(
    trainer: str, key: str, value: object, said: str
) -> None:
    found = legacy_of(trainer, key, value)
    assert found is not None
    assert found.sentence() == f"{said} {found.note}".strip()


@pytest.mark.parametrize(
    ("trainer", "key", "value", "write"),
    [
        ("dpo", "loss_type", ["sigmoid", "aot_pair"], {"loss_type": ["sigmoid", "aot_unpaired"]}),
        ("rloo", "kl_coef", 0.05, {"beta": 0.05}),
        ("sft", "dispatch_batches", False, {"accelerator_config": {"dispatch_batches": False}}),
        (
            "sft",
            "gradient_checkpointing_use_reentrant",
            True,
            {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
        ),
        ("sft", "group_by_length", True, {"train_sampling_strategy": "group_by_length"}),
        ("dpo", "preprocessing_num_workers", 12, {"dataset_num_proc": 12}),
        ("sft", "use_flash_attention_2", True, {"attn_implementation": "flash_attention_2"}),
        ("sft", "use_flash_attention_2", False, None),
        ("grpo", "wandb_project", "mine", {"env": {"WANDB_PROJECT": "mine"}}),
        ("sft", "hub_model_revision", "v1.0", {"hub_revision": "v1.0"}),
        ("sft", "group_by_length", False, None),
        ("grpo", "max_prompt_length", 512, None),
    ],
)
def test_what_is_written_has_the_user_s_value(trainer: str, key: str, value: object, write: object) -> None:
    found = legacy_of(trainer, key, value)
    assert found is not None
    assert found.write == write


def test_what_has_another_meaning_today_is_left_to_a_person() -> None:
    for trainer, key, value in (
        ("rloo", "num_mini_batches", 2),
        ("rloo", "normalize_reward", True),
        ("dpo", "loss_type", "kto_pair"),
        ("dpo", "loss_type", ["sft", "kto_pair"]),
        ("sft", "truncation_mode", "keep_end"),
        ("sft", "warmup_ratio", 1),
    ):
        found = legacy_of(trainer, key, value)
        assert found is not None
        assert found.by_hand
        assert found.write is None


def test_what_is_legal_is_not_in_the_table() -> None:
    for trainer, key, value in (
        ("sft", "max_length", 1),
        ("sft", "packing_strategy", "bfd"),
        ("sft", "padding_free", True),
        ("dpo", "padding_free", False),
        ("dpo", "loss_type", ["sigmoid", "sft"]),
        ("sft", "kl_coef", 0.1),
        ("reward", "use_liger_kernel", True),
        ("sft", "use_liger_kernel", False),
        ("mine", "learning_rate", 1),
    ):
        assert legacy_of(trainer, key, value) is None, key
    assert legacy_of("mine", "torch_dtype", "auto") is not None
