"""``autotune.plan`` from Python: refused arguments, and the meaning of lengths."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import autotune
from autotune.core.candidate import Choice
from autotune.core.documents.estimate import MemoryEstimate, Origin
from autotune.core.documents.explanation import Subject
from autotune.core.events import Event, Ranked
from autotune.errors import InputError
from autotune.planning.tracing.cache import Cache
from tests.small import long_tailed_texts, text_rows, write_rows

ONE_WAY: dict[str, Choice] = {
    "activation_offloading": "off", "attention": "sdpa", "gradient_checkpointing": "off", "liger": "off",
    "optimizer": "adamw_torch", "packing": "none", "pad_to_multiple_of": "none", "padding_free": "off",
    "precision": "float32", "per_device_train_batch_size": 2,
}  # fmt: skip
pytestmark = pytest.mark.usefixtures("traces_by_formula")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs a DATASET or --seq-len, and has neither"),
        ({"dataset": "rows.jsonl", "seq_len": 8}, "needs a DATASET or --seq-len, and has both"),
        (
            {"dataset": "a.jsonl", "eval_dataset": "b.jsonl", "trainer": "online_dpo"},
            "OnlineDPOTrainer cannot be evalu",
        ),
        ({"seq_len": 8, "trainer": "grpo", "prompt_coverage": 0.9}, "prompts that are all --seq-len long"),
        ({"seq_len": 0}, "A length of 0 tokens is not possible"),
        ({"seq_len": 64, "gpu": "24GiB", "memory_budget": 25 << 30}, "larger than 24GiB"),
        ({"seq_len": 64, "gpu": "24GiB", "memory_budget": "0GiB"}, "'0GiB' is not a size"),
        ({"seq_len": 64, "gpu": "24GiB", "trainer": "ppo"}, "ppo"),
        ({"seq_len": 64, "gpu": "24GiB", "timeout": 0}, "A time-out of 0 seconds is not possible"),
    ],
)
def test_what_cannot_be_used_is_said(model: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        autotune.plan(model, **options)  # type: ignore[arg-type]


def test_a_plan_has_the_batches_and_the_epoch_of_the_fastest_and_of_the_default(model: str, tmp_path: Path) -> None:
    rows = str(write_rows(tmp_path / "rows.jsonl", text_rows(long_tailed_texts(64))))
    found = autotune.plan(model, rows, gpu="RTX4090", fix=ONE_WAY)
    assert found.best is not None
    assert found.epoch is not None
    assert found.best.tokens_per_second is not None
    tokens = sum(part.tokens for part in found.lengths)
    assert found.epoch.token_coverage == 1.0
    assert found.epoch.seconds_per_epoch == pytest.approx(tokens / found.best.tokens_per_second)
    assert (found.epoch.per_device_train_batch_size, found.epoch.gradient_accumulation_steps) == (2, 4)
    assert (found.epoch.documents_per_step, found.epoch.steps_per_epoch) == (8, 8)
    assert found.epoch.tokens_per_step == pytest.approx(tokens / 8)
    assert found.baseline_epoch is not None


def test_a_time_limit_ends_the_search_of_a_plan_with_what_was_traced_by_then(model: str) -> None:
    told: list[Event] = []
    free = {knob: choice for knob, choice in ONE_WAY.items() if knob != "per_device_train_batch_size"}
    found = autotune.plan(model, seq_len=64, gpu="RTX4090", fix=free, timeout=0.001, listener=told.append)
    assert [each.candidate for each in found.estimates] == [found.baseline.candidate]
    assert found.fastest is not None
    assert any(isinstance(event, Ranked) for event in told)
    (note,) = (note for note in found.notes if "the time limit" in note)
    assert note.startswith("Of ")
    assert note.endswith(" 1 was traced before the time limit. Others may be faster or need less.")


def test_rows_of_one_length_are_no_epoch(model: str) -> None:
    found = autotune.plan(model, seq_len=64, gpu="RTX4090", fix=ONE_WAY)
    assert found.epoch is not None
    assert found.epoch.tokens_per_step == 8 * 64
    assert found.epoch.steps_per_epoch is found.epoch.seconds_per_epoch is None


@pytest.mark.parametrize(("gpu", "price", "noted"), [("RTX4090", 0.5, False), ("24GiB", None, True)])
def test_a_plan_has_the_price_of_its_gpu_or_a_note_that_there_is_none(
    gpu: str, price: float | None, noted: bool, model: str
) -> None:
    found = autotune.plan(model, seq_len=64, gpu=gpu, fix=ONE_WAY, prices={"RTX4090": 0.5})
    assert found.price == price
    assert (f"Without a price: {gpu}." in found.notes) == noted


def test_a_default_that_keeps_fewer_tokens_than_were_asked_for_has_a_note(model: str, tmp_path: Path) -> None:
    rows = str(write_rows(tmp_path / "rows.jsonl", text_rows(["a " * 1500] * 8)))
    found = autotune.plan(model, rows, gpu="RTX4090", fix=ONE_WAY, token_coverage=0.95)
    (sentence,) = (note for note in found.notes if note.startswith("TRL's default"))
    assert sentence.startswith("TRL's default may not be recommended: max_length=1024 keeps ")
    assert sentence.endswith(" of the dataset's tokens, and 95.0 % of the tokens were requested.")


@pytest.mark.slow
def test_a_plan_has_the_memory_of_a_step_the_lengths_and_what_was_asked_for(model: str) -> None:
    found = autotune.plan(model, seq_len=48, gpu="RTX4090", fix=ONE_WAY, memory_budget="20GiB", max_length=32)
    assert found.best is not None
    for estimate, timeline in ((found.best, found.timeline), (found.baseline, found.baseline_timeline)):
        assert timeline is not None
        assert estimate.memory is not None
        assert timeline.breakdown == estimate.memory.breakdown
    assert [(part.high, part.rows) for part in found.lengths] == [(48, sum(part.rows for part in found.lengths))]
    assert found.trainer == "sft"
    assert "torch" in found.environment
    assert found.settings == {
        "model": model, "gpu": "RTX4090", "seq_len": 48, "memory_budget": "20GiB", "max_length": 32, "fix": ONE_WAY,
    }  # fmt: skip


@pytest.mark.slow
def test_a_choice_that_the_gpu_cannot_do_is_refused(model: str) -> None:
    with pytest.raises(InputError, match="--fix precision=bfloat16 is not possible here: the GPU has no bf16"):
        autotune.plan(model, seq_len=64, gpu="T4", fix={"precision": "bfloat16", "attention": "sdpa"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "lengths"),
    [
        ({}, {48}),
        ({"max_length": 32}, {32}),
        ({"fix": {**ONE_WAY, "max_length": 16}}, {16}),
        ({"exclude": ("max_length",)}, {48}),
    ],
)
def test_rows_stay_whole_unless_the_user_says_where_they_are_cut(
    model: str, options: dict[str, Any], lengths: set[int]
) -> None:
    found = autotune.plan(model, seq_len=48, gpu="RTX4090", **{"fix": ONE_WAY, **options})
    assert {estimate.candidate["max_length"] for estimate in found.estimates} == lengths


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpu", "note"),
    [
        ("MI300X", "Somewhat less than the 192 GiB of MI300X can be allocated."),
        ("MI300X", "Whether autotune's rules hold for MI300X has not been verified."),
        ("24GiB", "The speed of 24GiB is not known, so no speed is predicted. Name a GPU, as with --gpu H100-80GB."),
        ("H100-80GB", "Nothing was measured. Other plans were compared with probes on an H100-SXM (docs/accuracy.md)."),
        ("H200", "Nothing was measured. Other plans were compared with probes on an H200 (docs/accuracy.md)."),
        ("H100-NVL", "Nothing was measured, and no prediction has been compared with this GPU yet."),
        ("T4", "Nothing was measured, and no prediction has been compared with this GPU yet."),
        ("cpu", "Nothing was measured. On a CPU these are bytes of tensors, without the libraries of a process."),
    ],
)
def test_what_is_not_certain_of_a_device_is_noted(model: str, gpu: str, note: str) -> None:
    assert note in autotune.plan(model, seq_len=48, gpu=gpu, fix=ONE_WAY).notes


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "subject"), [("20GiB", Subject.FASTEST), ("1MiB", Subject.BASELINE)])
def test_what_is_explained_is_the_fastest_that_fits_or_else_the_baseline(
    model: str, budget: str, subject: Subject
) -> None:
    found = autotune.plan(model, seq_len=48, gpu="RTX4090", memory_budget=budget, fix=ONE_WAY, explain=True)
    assert found.explanation is not None
    assert found.explanation.subject is subject
    shown = found.fastest if subject is Subject.FASTEST else found.baseline
    assert shown is not None
    assert shown.memory is not None
    assert found.explanation.candidate == shown.candidate
    assert found.explanation.peak is not None
    assert {name: shown.memory.breakdown[name] for name in found.explanation.peak.categories} == dict(
        found.explanation.peak.categories
    )
    assert found.explanation.geometry.worst.tokens == 48


@pytest.mark.slow
@pytest.mark.parametrize(
    "budget",
    [pytest.param("20GiB", id="something fits"), pytest.param("1MiB", id="nothing fits", marks=pytest.mark.nightly)],
)
def test_what_a_finished_plan_says_was_traced_itself_and_told_provisionally_before(model: str, budget: str) -> None:
    told: list[Event] = []
    found = autotune.plan(model, seq_len=48, gpu="RTX4090", memory_budget=budget, listener=told.append)
    said = [found.baseline, *found.estimates, *(change.instead for change in found.changes)]
    assert {estimate.origin for estimate in said if not estimate.reason} == {Origin.TRACED}
    assert len(found.estimates) <= 100
    assert found.fastest is None or found.fastest.origin is Origin.TRACED
    assert (found.fastest is not None) is (budget == "20GiB")
    rankings = [event for event in told if isinstance(event, Ranked)]
    assert len(rankings) > 1
    assert rankings[0].baseline == found.baseline.candidate


def _allocated(memory: MemoryEstimate) -> MemoryEstimate:
    breakdown = {name: size for name, size in memory.breakdown.items() if name != "fragmentation"}
    return replace(memory, varied_bytes=None, reserved_bytes=None, breakdown=breakdown)


def test_what_is_shown_of_many_candidates_is_what_each_is_planned_alone(model: str) -> None:
    free = ("gradient_checkpointing", "optimizer", "per_device_train_batch_size")
    fixed = {knob: choice for knob, choice in ONE_WAY.items() if knob not in free}
    shown = autotune.plan(model, seq_len=64, gpu="RTX4090", fix=fixed).estimates[:4]

    assert len(shown) >= 3
    for estimate in shown:
        alone = autotune.plan(model, seq_len=64, gpu="RTX4090", fix=dict(estimate.candidate))
        (found,) = alone.estimates
        assert found.memory is not None
        assert estimate.memory is not None
        # Only the fastest is traced at full depth, for what its allocator reserves and what varied lengths add.
        assert _allocated(found.memory) == _allocated(estimate.memory)
        assert replace(found, memory=None, spare_bytes=0) == replace(estimate, memory=None, spare_bytes=0)


@pytest.mark.slow
def test_nothing_is_explained_unless_that_is_asked_for(model: str) -> None:
    assert autotune.plan(model, seq_len=48, gpu="RTX4090", fix=ONE_WAY).explanation is None


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    cache = Cache(file / "cache")
    cache.put("key", {"a": 1})
    assert cache.get(dict[str, int], "key") is None
    assert "cannot be written: Not a directory" in cache.failure
