"""What ``plan`` and ``estimate`` say to input that they cannot use, and that they work on a real small model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

import autotune
from autotune.api.estimate import training_plan
from autotune.core.estimate import Origin
from autotune.errors import InputError
from autotune.planning.cache import Cache
from tests.small import write_small_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    return str(write_small_model(folder, "llama", weights=False, num_hidden_layers=4, max_position_embeddings=64))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "neither a dataset nor a length"),
        ({"dataset": "rows.jsonl", "seq_len": 8}, "both a dataset and a length"),
        ({"seq_len": -5}, "A length of -5 tokens is not possible"),
        ({"seq_len": 64, "top": 0}, "A top of 0"),
        ({"seq_len": 64, "gpu": "H100-8GB"}, "is not a known GPU"),
        ({"seq_len": 64, "gpu": "24GiB", "memory_budget": "80GiB"}, "larger than 24GiB"),
        ({"seq_len": 64, "gpu": "T4", "fix": {"precision": "bfloat16"}}, "no bf16"),
    ],
)
def test_what_cannot_be_used_is_said(model: str, options: dict[str, object], message: str, cache: Path) -> None:
    with pytest.raises(InputError, match=message):
        autotune.plan(model, **options)  # type: ignore[arg-type]


def test_a_gpu_that_is_misspelt_is_answered_by_the_closest(model: str) -> None:
    with pytest.raises(InputError) as raised:
        autotune.plan(model, seq_len=64, gpu="RTX4O90")
    assert "RTX4090" in raised.value.hint


class DPOConfig:
    """Stands for a configuration of another trainer."""


def test_the_configuration_of_another_trainer_is_refused() -> None:
    with pytest.raises(InputError, match="A DPOConfig is no configuration that autotune knows"):
        training_plan(DPOConfig(), None)


def test_peft_that_is_no_lora_is_refused() -> None:
    kind = type("SFTConfig", (SimpleNamespace,), {})
    config = kind(
        model_init_kwargs=None,
        packing=False,
        padding_free=False,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
    )
    with pytest.raises(InputError, match="A SimpleNamespace is not understood"):
        training_plan(config, SimpleNamespace())


@pytest.mark.parametrize("shape", [(0, 8), (1, -1), (1, 1 << 40)])
def test_shapes_that_are_absurd_are_refused(model: str, shape: tuple[int, int]) -> None:
    with pytest.raises(InputError, match="is not possible"):
        autotune.estimate(model, SimpleNamespace(), shape=shape, gpu="T4")


def test_a_cache_that_cannot_be_written_is_said_and_done_without(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    cache = Cache(file / "cache")
    cache.put("key", {"a": 1})
    assert cache.get("key") is None
    assert "cannot be made" in cache.problem


@pytest.mark.slow
def test_a_small_model_is_planned_from_traces_and_then_from_the_cache(model: str, cache: Path) -> None:
    fixed = {"attention": "sdpa", "activation_offloading": "off", "optimizer": "adamw_torch", "packing": "none",
             "padding_free": "off", "liger": "off", "pad_to_multiple_of": "none", "precision": "float32"}  # fmt: skip
    fixed["gradient_checkpointing"] = "off"
    first = autotune.plan(model, seq_len=128, gpu="RTX4090", fix=fixed)
    again = autotune.plan(model, seq_len=128, gpu="RTX4090", fix=fixed)
    assert first.new_trace_count == first.trace_count > 0
    assert again.new_trace_count == 0
    assert again.estimates == first.estimates
    assert {estimate.origin for estimate in first.estimates} == {Origin.TRACED}
    assert first.fastest is not None
    by_rows = {item.candidate["per_device_train_batch_size"]: item.memory for item in first.estimates}
    peaks = [memory.peak_bytes for rows in (1, 2, 4) if (memory := by_rows[rows]) is not None]
    assert peaks == sorted(set(peaks))
    assert any("made for 64 positions" in note for note in first.notes)


@pytest.mark.slow
@pytest.mark.parametrize(("gpu", "lora"), [("H100-80GB", False), ("cpu", False), ("24GiB", True)])
def test_a_configuration_of_the_user_is_estimated(model: str, gpu: str, lora: bool, cache: Path) -> None:
    from peft import LoraConfig
    from trl import SFTConfig

    config = SFTConfig(
        per_device_train_batch_size=2, gradient_accumulation_steps=4, bf16=False, use_cpu=True, report_to="none"
    )
    peft_config = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM") if lora else None
    found = autotune.estimate(model, config, peft_config, shape=(2, 64), gpu=gpu)
    assert sum(found.breakdown.values()) == found.device_bytes
    assert (found.reserved_bytes is None) == (gpu == "cpu")
    assert (found.step_seconds is not None) == (gpu == "H100-80GB")
    # AdamW keeps two numbers for each that is trained; a few more bytes count its steps.
    trained = found.breakdown["gradient"] if not lora else 0
    if trained:
        assert found.breakdown["optimizer state"] == pytest.approx(2 * found.breakdown["parameter"], rel=0.01)
    else:
        assert found.breakdown.get("optimizer state", 0) < found.breakdown["parameter"]
