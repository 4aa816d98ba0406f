"""Plans of several processes: the need of each, and the tokens of all."""

from __future__ import annotations

from pathlib import Path

import pytest

import autotune
from autotune.core.documents.estimate import Estimate, Plan
from autotune.core.plan import TrainingPlan
from autotune.core.step_time import StepTime
from autotune.core.timeline import Occurrence, Part
from autotune.planning.extrapolation.forecast import Forecast, mean_times
from tests.small import write_small_model
from tests.step.plans import needs_deepspeed

SPACE = """
trainer: sft
techniques:
  sharding: [ddp, zero2, fsdp2]
  offload: [none, optimizer]
  per_device_train_batch_size: [1, 2]
"""
SPLIT_SPACE = """
trainer: sft
techniques:
  sharding: [fsdp2]
  context_parallel: [1, 2, 4]
  per_device_train_batch_size: [1]
"""
ONE_WAY = {"gradient_checkpointing": "off", "precision": "float32", "attention": "sdpa"}
pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    return str(write_small_model(folder, "llama", weights=False, hidden_size=128, intermediate_size=256))


def shown(plan: Plan, **choices: object) -> Estimate:
    wanted = choices.items()
    return next(item for item in plan.estimates if all(item.candidate[name] == value for name, value in wanted))


@pytest.mark.nightly
@needs_deepspeed
def test_shards_need_less_and_the_tokens_are_those_of_all_processes(model: str, tmp_path: Path) -> None:
    space = tmp_path / "space.yaml"
    space.write_text(SPACE, encoding="utf-8")
    plan = autotune.plan(
        model, seq_len=64, gpu="RTX4090", num_processes=4, global_batch_size=8, space=space, fix=ONE_WAY
    )
    two = {"per_device_train_batch_size": 2}
    ddp, zero2, fsdp2 = (shown(plan, sharding=name, offload="none", **two) for name in ("ddp", "zero2", "fsdp2"))
    for estimate in (ddp, zero2, fsdp2):
        assert estimate.memory is not None
        assert estimate.tokens_per_second is not None
        assert estimate.memory.step_seconds is not None
        assert estimate.tokens_per_second == pytest.approx(8 * 64 / estimate.memory.step_seconds)
    assert ddp.memory is not None
    assert zero2.memory is not None
    assert fsdp2.memory is not None
    assert fsdp2.memory.breakdown["optimizer state"] < ddp.memory.breakdown["optimizer state"] / 3
    assert zero2.memory.breakdown["optimizer state"] < ddp.memory.breakdown["optimizer state"] / 3
    # The optimizer then runs on the host, of which no speed is known.
    offloaded = shown(plan, sharding="zero2", offload="optimizer", **two)
    assert offloaded.memory is not None
    assert offloaded.tokens_per_second is None
    assert offloaded.memory.host_bytes > zero2.memory.host_bytes


@pytest.mark.nightly
def test_rows_that_are_split_need_less_and_the_step_has_the_same_documents(model: str, tmp_path: Path) -> None:
    space = tmp_path / "space.yaml"
    space.write_text(SPLIT_SPACE, encoding="utf-8")
    ways: dict[str, str | int] = {
        **ONE_WAY, "precision": "float32+bf16", "sharding": "fsdp2", "pad_to_multiple_of": 64,
        "per_device_train_batch_size": 1,
    }  # fmt: skip
    needs = []
    # Rows of 1,000 tokens are split only on request.
    for shared in (1, 2, 4):
        fixed = {**ways, "context_parallel": shared} if shared > 1 else ways
        plan = autotune.plan(
            model, seq_len=1000, gpu="RTX4090", num_processes=4, global_batch_size=8, space=space, fix=fixed
        )
        assert {estimate.candidate["context_parallel"] for estimate in plan.estimates} == {shared}
        best = plan.estimates[0]
        assert best.memory is not None
        assert best.memory.step_seconds is not None
        assert best.tokens_per_second == pytest.approx(8 * 1000 / best.memory.step_seconds)
        needs.append(best.memory)
    assert needs[0].peak_bytes > needs[1].peak_bytes > needs[2].peak_bytes


def signature_from(time: float) -> StepTime:
    return StepTime(time, time, 0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("args", "seconds"),
    [
        ({}, 2 * 6 / 3),
        ({"num_train_epochs": 2}, 2 * 6 / 2),
        # One micro-batch of the pass is as large as eight of training.
        ({"precompute_ref_batch_size": 32}, 2 * 6 / 3 / 8),
    ],
)
def test_a_pass_before_training_is_spread_over_the_micro_batches_of_all_epochs(
    args: dict[str, object], seconds: float
) -> None:
    plan = TrainingPlan("dpo", {"per_device_train_batch_size": 4, **args})
    found = Forecast({}, 0.0, 0, 0, 0, 0, 0, {Part("precompute", Occurrence.BEFORE): signature_from(6.0)})
    time = mean_times([(found, 1.0)], plan.pass_share(1000)).step(2)
    assert time is not None
    assert time.seconds == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("between", "micro_batches", "seconds"),
    [
        (Occurrence.FURTHER, 1, 1 + 100),
        (Occurrence.FURTHER, 4, 1 + 3 * 10 + 100),
        (Occurrence.FIRST, 1, 1 + 100),
        (Occurrence.FIRST, 4, 3 * 1 + 10 + 100),
    ],
)
def test_gradients_are_exchanged_in_the_last_micro_batch_alone(
    between: Occurrence, micro_batches: int, seconds: float
) -> None:
    times = {
        Part("micro-batch", Occurrence.FIRST): signature_from(1.0),
        Part("optimizer step", Occurrence.ONCE): signature_from(100.0),
    }
    if micro_batches > 1:
        times[Part("micro-batch", Occurrence.FURTHER)] = signature_from(10.0)
    time = Forecast({}, 0.0, 0, 0, 0, 0, 0, times, between).step(micro_batches)
    assert time is not None
    assert time.seconds == seconds


@pytest.mark.nightly
@needs_deepspeed
@pytest.mark.parametrize("trainer", ["dpo", "kto"])
def test_a_reference_that_is_asked_before_training_is_traced_with_one_process_that_offloads(
    model: str, trainer: str
) -> None:
    chosen: dict[str, str | int] = {
        **ONE_WAY, "sharding": "zero3", "offload": "both", "reference": "precomputed", "per_device_train_batch_size": 2,
    }  # fmt: skip
    plan = autotune.plan(model, seq_len=64, gpu="RTX4090", trainer=trainer, global_batch_size=4, fix=chosen)
    assert plan.baseline.memory is not None, plan.baseline.reason
