"""``autotune.estimate`` on a real small model and TRL's own configuration objects."""

from __future__ import annotations

from typing import Any

import pytest
from peft import LoraConfig
from trl import GRPOConfig, SFTConfig

import autotune
from autotune.app.estimate import _traced_shape
from autotune.core.documents.estimate import MemoryEstimate
from autotune.core.rows.batch_geometry import Layout, Shape
from autotune.errors import AutotuneError, InputError
from autotune.userconfig.fields import user_plan
from autotune.userconfig.objects import configuration_of
from tests.small import VOCABULARY

POSITIONS = 64
WIDTH = 64
pytestmark = pytest.mark.usefixtures("own_cache")


def sft(**options: Any) -> SFTConfig:
    """Return a configuration that can be made on a machine without a GPU."""
    return SFTConfig(**{"per_device_train_batch_size": 2, "use_cpu": True, "bf16": False, **options})


@pytest.fixture(scope="module")
def whole(model: str) -> MemoryEstimate:
    """All weights are trained, on a GPU of the catalogue."""
    return autotune.estimate(model, sft(gradient_accumulation_steps=4), shape=(2, POSITIONS), gpu="H100-80GB")


@pytest.fixture(scope="module")
def adapters(model: str) -> MemoryEstimate:
    """Adapters and a copy of the head are trained, on a GPU of which only the size is known, with odd sizes."""
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    config = sft(per_device_train_batch_size=8, max_length=32, pad_to_multiple_of=64)
    return autotune.estimate(model, config, lora, shape=(2, 100), gpu="24GiB")


@pytest.fixture(scope="module")
def on_cpu(model: str) -> MemoryEstimate:
    """A compiled step on a CPU."""
    return autotune.estimate(model, sft(torch_compile=True), shape=(2, POSITIONS), gpu="cpu")


@pytest.mark.parametrize(("options", "tokens"), [({"padding_free": True}, 1088), ({}, 128)])
def test_rows_end_to_end_are_padded_as_a_whole(options: dict[str, Any], tokens: int) -> None:
    plan = user_plan(configuration_of(sft(pad_to_multiple_of=64, **options)), {}, evaluates=False).plan
    assert _traced_shape(plan, 16, 65)[1].tokens == tokens


def test_a_single_row_has_padding_only_where_it_is_rounded_up() -> None:
    plan = user_plan(configuration_of(sft(pad_to_multiple_of=64)), {}, evaluates=False).plan
    assert _traced_shape(plan, 1, 65) == (Layout.PADDED, Shape(1, 128))
    assert _traced_shape(plan, 1, 128) == (Layout.EQUAL, Shape(1, 128))


@pytest.mark.slow
def test_the_parts_of_an_estimate_make_the_whole(whole: MemoryEstimate, adapters: MemoryEstimate) -> None:
    for found in (whole, adapters):
        assert sum(found.breakdown.values()) == found.device_bytes
        assert found.reserved_bytes is not None
        assert found.reserved_bytes >= found.peak_bytes > 0


@pytest.mark.slow
def test_what_varied_lengths_may_add_is_said_of_a_gpu_and_is_nothing_on_a_cpu(
    whole: MemoryEstimate, on_cpu: MemoryEstimate
) -> None:
    assert whole.varied_bytes is not None
    assert whole.most_bytes >= 1.1 * whole.device_bytes + whole.varied_bytes - 1
    assert on_cpu.varied_bytes == 0


@pytest.mark.slow
def test_adamw_keeps_two_numbers_for_each_that_is_trained(whole: MemoryEstimate) -> None:
    # A few more bytes count its steps.
    assert whole.breakdown["optimizer state"] == pytest.approx(2 * whole.breakdown["parameter"], rel=0.01)


@pytest.mark.slow
def test_beside_adapters_what_is_saved_whole_is_trained_whole(whole: MemoryEstimate, adapters: MemoryEstimate) -> None:
    head = VOCABULARY * WIDTH * 4
    assert adapters.breakdown["parameter"] > whole.breakdown["parameter"] + head
    assert 2 * head < adapters.breakdown["optimizer state"] < whole.breakdown["optimizer state"]


@pytest.mark.slow
def test_time_is_told_where_the_speed_of_the_gpu_is_known(whole: MemoryEstimate, adapters: MemoryEstimate) -> None:
    assert whole.step_seconds is not None
    assert whole.step_seconds > 0
    assert adapters.step_seconds is None


@pytest.mark.slow
def test_on_a_cpu_there_is_no_allocator_and_no_context(on_cpu: MemoryEstimate) -> None:
    assert (on_cpu.reserved_bytes, on_cpu.context_bytes) == (None, 0)
    assert on_cpu.device_bytes == on_cpu.peak_bytes == sum(on_cpu.breakdown.values())


@pytest.mark.slow
def test_sizes_of_the_shape_that_the_configuration_contradicts_are_said(adapters: MemoryEstimate) -> None:
    assert adapters.assumptions[:3] == (
        "2 rows, as in the shape, instead of the configuration's per_device_train_batch_size=8",
        "rows of 128 tokens, as in the shape, though the configuration's max_length=32 cuts them",
        "rows of 128 tokens work, though the model was made for 64 positions",
    )


@pytest.mark.slow
def test_what_a_trace_assumed_is_said(on_cpu: MemoryEstimate, whole: MemoryEstimate) -> None:
    assert any("uncompiled" in assumption for assumption in on_cpu.assumptions)
    assert not any("uncompiled" in assumption for assumption in whole.assumptions)


@pytest.mark.slow
def test_a_step_that_cannot_be_traced_is_an_error_that_says_why_and_names_a_probe(model: str) -> None:
    with pytest.raises(AutotuneError, match="cannot be traced") as raised:
        autotune.estimate(model, sft(optim="lomo"), shape=(2, POSITIONS), gpu="T4")
    assert "lomo" in raised.value.message
    assert "autotune probe" in raised.value.hint


@pytest.mark.parametrize("shape", [(0, 8), (1, -1), (1, 1 << 40), (1, 8, 2), (8,)])
def test_shapes_that_are_absurd_are_refused(model: str, shape: tuple[int, int]) -> None:
    with pytest.raises(InputError, match=r"is not possible|A shape has two numbers, and \(.*\) has [13]\."):
        autotune.estimate(model, sft(), shape=shape, gpu="T4")


@pytest.mark.slow
def test_completions_are_a_part_of_the_rows_of_a_trainer_that_generates_them(model: str) -> None:
    config = GRPOConfig(per_device_train_batch_size=8, max_completion_length=16, use_cpu=True, bf16=False)
    found, more = (autotune.estimate(model, config, shape=(8, tokens), gpu="cpu") for tokens in (40, 80))
    assert found.device_bytes < more.device_bytes
    with pytest.raises(InputError, match=r"16 tokens \(max_completion_length\) leave no prompt in a row of 16"):
        autotune.estimate(model, config, shape=(8, 16), gpu="cpu")


def test_what_a_configuration_sets_to_null_is_traced_as_null(model: str) -> None:
    with pytest.raises(AutotuneError, match="not supported between instances of 'NoneType' and 'int'"):
        autotune.estimate(model, sft(max_grad_norm=None), shape=(1, 8), gpu="cpu")


def test_an_empty_shape_of_evaluation_is_refused(model: str) -> None:
    with pytest.raises(InputError, match=r"A shape has two numbers, and \(\) has 0\."):
        autotune.estimate(model, sft(), shape=(1, 8), gpu="T4", eval_shape=())  # type: ignore[arg-type]


def test_a_configuration_that_is_not_understood_is_refused_before_anything_is_traced(model: str) -> None:
    with pytest.raises(InputError, match=r"LoraConfig\(bias='all'\)"):
        autotune.estimate(model, sft(), LoraConfig(bias="all"), shape=(1, 8), gpu="T4")
