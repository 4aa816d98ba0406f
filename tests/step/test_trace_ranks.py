"""The job ``trace`` for plans with several processes: sharded, kept, sent and offloaded state."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.core.gpu import AchievedRates
from autotune.core.jobs.traced import GpuFigures, TraceReply, TraceRequest
from autotune.core.plan import Launch, TrainingPlan
from autotune.core.program import CONSTRUCTION, MICRO_BATCH, SAVE
from autotune.core.step_time import StepTime
from autotune.core.timeline import Occurrence, Part, Section
from autotune.core.workload import ModelSource
from autotune.errors import AutotuneError
from autotune.inspection.gpus import find_gpu
from autotune.probing import JobServer, trace
from autotune.techniques import find
from autotune.techniques.base import facts
from autotune.techniques.traits import library_patches_key
from autotune.trainers import find_trainer
from tests.settings import EIGHT, machine_with, setting
from tests.small import VOCABULARY, write_small_model
from tests.step.plans import context_parallel, fsdp2, needs_deepspeed, zero

RANKS = 8
LAYERS, WIDTH, INNER = 2, 256, 768
LENGTH, ROWS = 256, 2
# Per layer: queries and output, keys and values, three of the feed-forward, two norms; then the words and a norm.
PARAMETERS = LAYERS * (2 * WIDTH**2 + WIDTH**2 + 3 * WIDTH * INNER + 2 * WIDTH) + VOCABULARY * WIDTH + WIDTH
ACCUMULATED = {"gradient_accumulation_steps": 2}
TO_HOST = {"device": "cpu", "pin_memory": True}
# By default, DeepSpeed also holds all weights of few elements whole.
ZERO3 = zero(3, stage3_param_persistence_threshold=0, stage3_gather_16bit_weights_on_model_save=True)
LORA: dict[str, Any] = {"use_peft": True, "lora_r": 8, "lora_target_modules": "all-linear"}
_LISTED = find_gpu("A100-80GB")
assert _LISTED.speeds is not None
FULL_SPEED = replace(_LISTED.speeds, achieved=AchievedRates())
A100 = replace(_LISTED, speeds=FULL_SPEED)
pytestmark = pytest.mark.slow


def a_plan(
    args: Mapping[str, object], words: Mapping[str, object] | None = None, processes: int = RANKS, machines: int = 1
) -> TrainingPlan:
    """Return a plan in bfloat16, with batches that every case has."""
    shape = {"per_device_train_batch_size": ROWS, "max_length": LENGTH, "gradient_checkpointing": False, "bf16": True}
    return TrainingPlan("sft", {**shape, **args}, words or {}, launch=Launch(processes, machines))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose words are tied to its output."""
    return write_small_model(
        tmp_path_factory.mktemp("ranks") / "model",
        weights=False,
        num_hidden_layers=LAYERS,
        hidden_size=WIDTH,
        intermediate_size=INNER,
    )


def a_request(plan: TrainingPlan, model: Path) -> TraceRequest:
    """Return the request to trace a plan on rows of full length."""
    return TraceRequest(plan=plan, model=ModelSource(str(model)), target="cuda", worst=((LENGTH,),) * ROWS, gpu=A100)


@pytest.fixture(scope="module")
def traced(traced_once: Any, model: Path) -> Any:
    """A function that traces a plan, once: its arguments and model words, and the numbers of processes and machines."""
    return lambda args, words=None, **more: traced_once(a_request(a_plan(args, words, **more), model))


def section(reply: TraceReply, phase: str, occurrence: Occurrence) -> Section:
    """Return one section of a reply."""
    return next(found for found in reply.sections if found.part == Part(phase, occurrence))


def at_rest(reply: TraceReply) -> dict[str, int]:
    """Return the bytes between steps, by category."""
    return {name: levels[0] for name, levels in section(reply, SAVE, Occurrence.AFTER).levels.items()}


def highest(reply: TraceReply, occurrence: Occurrence) -> int:
    """Return the peak of a micro-batch."""
    return max(section(reply, MICRO_BATCH, occurrence).totals)


@pytest.mark.parametrize(
    ("args", "parameters", "gradients", "states"),
    [
        # In bytes per parameter. The buckets of DDP hold gradients all the time.
        ({}, 4, 4, 8),
        (fsdp2(), 4 / RANKS, 0, 8 / RANKS),
        (fsdp2(cpu_offload=True), 0, 0, 0),
        ({**fsdp2(), "parallelism_config": {"dp_shard_size": 4, "dp_replicate_size": 2}}, 1, 0, 2),
        pytest.param(zero(1), 2 + 4 / RANKS, 0, 8 / RANKS, marks=[pytest.mark.nightly, needs_deepspeed]),
        pytest.param(zero(2), 2 + 4 / RANKS, 0, 8 / RANKS, marks=needs_deepspeed),
        pytest.param(zero(2, offload_optimizer=TO_HOST), 2, 0, 0, marks=[pytest.mark.nightly, needs_deepspeed]),
        pytest.param(ZERO3, 6 / RANKS, 2 / RANKS, 8 / RANKS, marks=needs_deepspeed),
    ],
    ids=["ddp", "fsdp2", "fsdp2-offloaded", "hybrid", "zero1", "zero2", "zero2-offloaded", "zero3"],
)
def test_a_rank_holds_its_shares_between_steps(
    traced: Any, args: dict[str, Any], parameters: float, gradients: float, states: float
) -> None:
    held = at_rest(traced(args))

    # Single numbers, such as the optimizer's count of steps, and the padding of shards.
    expected = {"parameter": parameters, "gradient": gradients, "optimizer state": states}
    for category, bytes_each in expected.items():
        assert held.get(category, 0) == pytest.approx(bytes_each * PARAMETERS, rel=0.01, abs=0.02 * PARAMETERS)


def test_fsdp2_trains_weights_in_bf16_as_float32_where_products_are_mixed(traced: Any) -> None:
    for mixed, bytes_each in ((True, 4), (False, 2)):
        held = at_rest(traced({**fsdp2(), "bf16": mixed}, {"dtype": "bfloat16"}))
        for category, copies in (("parameter", 1), ("optimizer state", 2)):
            assert held[category] == pytest.approx(copies * bytes_each * PARAMETERS / RANKS, rel=0.02)


@pytest.mark.nightly
def test_frozen_weights_that_fsdp2_shards_are_parameters(traced: Any) -> None:
    held = at_rest(traced({**fsdp2(), "bf16": False}, {"dtype": "bfloat16", **LORA}))
    assert held["parameter"] == pytest.approx(2 * PARAMETERS / RANKS, rel=0.2)


@needs_deepspeed
def test_zero_3_holds_sixteen_bytes_for_each_parameter_of_its_shard(traced: Any) -> None:
    # Weights and gradients in bfloat16, weights in float32, two states. The bucket that it reduces in has as many
    # elements as a square of the model's width.
    held = sum(at_rest(traced(ZERO3)).values())
    assert held == pytest.approx(16 * PARAMETERS / RANKS + 2 * WIDTH**2, rel=0.03)


@needs_deepspeed
@pytest.mark.nightly
@pytest.mark.parametrize("stage", [1, 2])
def test_a_copy_of_the_weights_that_deepspeed_avoids_on_a_full_gpu_is_no_part_of_the_peak(
    traced: Any, stage: int
) -> None:
    built = section(traced(zero(stage, offload_optimizer=TO_HOST)), CONSTRUCTION, Occurrence.BEFORE)
    # In bfloat16: all weights, and the rank's part of them, which becomes that of the optimizer.
    assert built.totals[0] == pytest.approx((2 + 2 / RANKS) * PARAMETERS, rel=0.02)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("args", "offloaded", "bytes_per_parameter"),
    [
        (fsdp2(), fsdp2(cpu_offload=True), 12),
        pytest.param(zero(2), zero(2, offload_optimizer=TO_HOST), 12, marks=[pytest.mark.nightly, needs_deepspeed]),
        pytest.param(zero(3), zero(3, offload_optimizer=TO_HOST), 12, marks=[pytest.mark.nightly, needs_deepspeed]),
        pytest.param(zero(3), zero(3, offload_optimizer=TO_HOST, offload_param=TO_HOST), 14, marks=needs_deepspeed),
    ],
    ids=["fsdp2", "zero2", "zero3-optimizer", "zero3-both"],
)
def test_what_is_offloaded_lies_on_the_host(
    traced: Any, args: dict[str, Any], offloaded: dict[str, Any], bytes_per_parameter: int
) -> None:
    plain, moved = traced(args), traced(offloaded)
    on_host = section(moved, MICRO_BATCH, Occurrence.FIRST).host_bytes

    assert on_host >= 0.99 * bytes_per_parameter * PARAMETERS / RANKS
    assert sum(at_rest(moved).values()) < sum(at_rest(plain).values())


def test_weights_that_are_kept_after_the_forward_pass_are_part_of_the_peak(traced: Any) -> None:
    assert traced(fsdp2(reshard_after_forward=False)).device.bytes > traced(fsdp2()).device.bytes
    assert traced({**fsdp2(), "gradient_checkpointing": True}).device.bytes < traced(fsdp2()).device.bytes


@pytest.mark.nightly
def test_fsdp2_keeps_whole_gradients_between_micro_batches_unless_it_sums_them_in_each(traced: Any) -> None:
    reply = traced({**fsdp2(), **ACCUMULATED})
    grown = highest(reply, Occurrence.FURTHER) - highest(reply, Occurrence.FIRST)
    assert grown == pytest.approx(2 * PARAMETERS, rel=0.1)
    synced = {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}
    reply = traced({**fsdp2(), **ACCUMULATED, **synced})
    assert 0 <= highest(reply, Occurrence.FURTHER) - highest(reply, Occurrence.FIRST) <= 4 * PARAMETERS / RANKS


@pytest.mark.nightly
@needs_deepspeed
def test_zero_1_keeps_whole_gradients_between_micro_batches_and_zero_2_its_share(traced: Any) -> None:
    grown = []
    for stage in (1, 2):
        reply = traced({**zero(stage), **ACCUMULATED})
        grown.append(highest(reply, Occurrence.FURTHER) - highest(reply, Occurrence.FIRST))
    assert grown[0] == pytest.approx(2 * PARAMETERS, rel=0.1)
    assert 0 <= grown[1] <= 4 * PARAMETERS / RANKS


@needs_deepspeed
@pytest.mark.parametrize("args", [zero(1), {**zero(1), **ACCUMULATED}], ids=["alone", "accumulated"])
def test_what_zero_1_keeps_of_gradients_is_no_activation(traced: Any, args: dict[str, Any]) -> None:
    occurrence = Occurrence.FURTHER if "gradient_accumulation_steps" in args else Occurrence.FIRST
    levels = section(traced(args), MICRO_BATCH, occurrence).levels

    # That of the words comes last, and alone is not at a peak.
    assert 1.7 * PARAMETERS < max(levels["gradient"]) < 2.5 * PARAMETERS


@pytest.mark.nightly
@needs_deepspeed
def test_the_share_in_which_zero_2_adds_up_in_float32_is_one_of_gradients(traced: Any) -> None:
    engine = zero(2)
    engine["deepspeed"]["data_types"] = {"grad_accum_dtype": "fp32"}
    levels = section(traced({**engine, **ACCUMULATED}), MICRO_BATCH, Occurrence.FURTHER).levels
    assert levels["gradient"][0] == pytest.approx(4 * PARAMETERS / RANKS, rel=0.01)


@pytest.mark.nightly
@needs_deepspeed
def test_of_the_whole_model_the_rank_of_zero_2_that_needs_the_most_is_traced(
    job_server: JobServer, tmp_path: Path
) -> None:
    words = 16 * VOCABULARY
    sizes: dict[str, Any] = {"weights": False, "hidden_size": WIDTH, "intermediate_size": INNER, "vocab_size": words}
    whole, deeper = (
        write_small_model(tmp_path / str(layers), num_hidden_layers=layers, **sizes) for layers in (LAYERS, LAYERS + 1)
    )
    plan = a_plan({**zero(2), **ACCUMULATED})
    requests = [replace(a_request(plan, model), layers=LAYERS) for model in (whole, deeper)]
    most, last = (trace(job_server, each, tmp_path / str(number), 200.0) for number, each in enumerate(requests))

    # One rank holds the words whole, in bfloat16, and the first tensors of a layer; the last holds less than a layer.
    assert words * WIDTH < most.device.bytes - last.device.bytes < 2 * 2 * (words + 3 * INNER) * WIDTH


def sending(reply: TraceReply) -> float:
    """Return the bytes that a rank sends in a step over links that reach all of their speed."""
    assert FULL_SPEED.nvlink is not None
    return sum(time.communication_seconds for time in in_step(reply, reply.own)) * FULL_SPEED.nvlink


def in_step(reply: TraceReply, figures: GpuFigures) -> list[StepTime]:
    """Return the times of the parts of a traced optimizer step on a GPU."""
    step = (Occurrence.ONCE, Occurrence.FIRST, Occurrence.FURTHER)
    timed = zip(reply.sections, figures.times, strict=True)
    found = [time for section, time in timed if time is not None and section.part.occurrence in step]
    assert found
    return found


@pytest.mark.nightly
def test_the_more_ranks_share_a_row_the_less_each_holds_of_it(traced: Any) -> None:
    whole, half, quarter = (traced(args) for args in (fsdp2(), context_parallel(2, 4), context_parallel(4, 2)))

    activations = [reply.device.categories["activation"] for reply in (whole, half, quarter)]
    assert activations[1] == pytest.approx(activations[0] / 2, rel=0.25)
    assert activations[2] == pytest.approx(activations[1] / 2, rel=0.25)
    # In each layer, all ranks of a row get the keys and values of the others in both passes, in bfloat16; gradients of
    # them go round among these ranks once, in float32. Keys and values are half as wide as the model.
    sent = [(sending(reply) - sending(whole)) for reply in (half, quarter)]
    keys_and_values = 2 * ROWS * LENGTH * WIDTH // 2
    for ranks, measured in ((2, sent[0]), (4, sent[1])):
        assert measured == pytest.approx(LAYERS * keys_and_values / ranks * (2 * 2 * (ranks - 1) + 4 * ranks), rel=0.01)
    # Two ranks train on one micro-batch.
    assert half.tokens_per_step == whole.tokens_per_step / 2 == (RANKS // 2) * ROWS * LENGTH


@pytest.mark.nightly
@pytest.mark.parametrize("heads", [2, 4], ids=["grouped", "each its own"])
@pytest.mark.parametrize(
    ("precision", "gpu"),
    [("float32", "A100-80GB"), ("float32+bf16", "A100-80GB"), ("bfloat16", "H100-80GB"), ("float32+fp16", "T4")],
)
def test_rows_are_split_by_the_kernels_that_context_parallel_takes(
    job_server: JobServer, tmp_path: Path, heads: int, precision: str, gpu: str
) -> None:
    model = write_small_model(tmp_path / "model", weights=False, num_key_value_heads=heads)
    trainer, device = find_trainer("sft"), find_gpu(gpu)
    here = setting(machine=machine_with(EIGHT, compute_capability=device.compute_capability))
    here = replace(here, ranks_per_row=2)
    known = replace(here.workload.model, grouped_heads=heads < 4)
    here = replace(here, workload=replace(here.workload, model=known))
    start = trainer.defaults(here)
    split = start.but(sharding="fsdp2", context_parallel=2, pad_to_multiple_of=64, precision=precision, max_length=64)
    planned = trainer.plan(split, here)
    args = {**a_plan(context_parallel(2, 4)).args, "bf16": planned.args["bf16"], "fp16": planned.args["fp16"]}
    plan = TrainingPlan("sft", args, {"dtype": planned.model["dtype"]}, launch=Launch(RANKS))
    said = find("context_parallel", trainer.techniques).conflict(2, split, here)
    mixed = pytest.raises(AutotuneError, match=r"got mixed torch\.Tensor and DTensor")
    with mixed if said is not None else nullcontext():
        trace(job_server, replace(a_request(plan, model), gpu=device), tmp_path / "job", 200.0)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("trainer", "reason"), [("dpo", "broadcast a dimension of length"), ("kto", "broadcast a dimension of length")]
)
def test_trainers_that_cannot_split_rows_fail(
    job_server: JobServer, model: Path, tmp_path: Path, trainer: str, reason: str
) -> None:
    plan = replace(a_plan(context_parallel(2, 4)), trainer=trainer)
    row, _ = find_trainer(trainer).row_of(LENGTH)
    with pytest.raises(AutotuneError, match=reason):
        trace(job_server, replace(a_request(plan, model), worst=(row,) * ROWS), tmp_path / "job", 200.0)
    assert 2 in facts(find("context_parallel", find_trainer(trainer).techniques), trainer).refused


@pytest.mark.nightly
def test_rows_are_split_in_replicas_with_checkpointing_and_adapters_and_in_evaluation(traced: Any) -> None:
    sizes = {"cp_size": 2, "dp_shard_size": 2, "dp_replicate_size": 2}
    split = {**fsdp2(), "parallelism_config": sizes, "eval_strategy": "epoch", "per_device_eval_batch_size": ROWS}
    plain, kept = traced(split), traced({**split, "gradient_checkpointing": True}, LORA)
    assert plain.tokens_per_step == kept.tokens_per_step == 4 * ROWS * LENGTH
    # Evaluation leaves the tail of the model (the words and a norm) gathered, in bfloat16.
    tail = 2 * (VOCABULARY + 1) * WIDTH
    assert at_rest(plain)["parameter"] == pytest.approx(4 / 4 * PARAMETERS + tail, rel=0.02)
    halves = traced(context_parallel(2, 4))
    assert highest(kept, Occurrence.FIRST) < highest(plain, Occurrence.FIRST)
    assert highest(plain, Occurrence.FIRST) > highest(halves, Occurrence.FIRST)


@pytest.mark.parametrize(
    ("args"),
    [
        fsdp2(),
        pytest.param(zero(2), marks=[pytest.mark.nightly, needs_deepspeed]),
        pytest.param(ZERO3, marks=[pytest.mark.nightly, needs_deepspeed]),
    ],
    ids=["fsdp2", "zero2", "zero3"],
)
def test_adapters_are_sharded_too(traced: Any, args: dict[str, Any]) -> None:
    reply = traced(args, LORA)

    # Queries and output are square, keys and values half as wide; three are the feed-forward's.
    adapters = LAYERS * LORA["lora_r"] * (2 * 2 * WIDTH + 2 * 3 * WIDTH // 2 + 3 * (WIDTH + INNER))
    assert at_rest(reply)["optimizer state"] == pytest.approx(8 * adapters / RANKS, rel=0.05)
    assert sum(at_rest(reply).values()) < sum(at_rest(traced(args)).values())


def test_ranks_send_what_their_engine_reduces_and_gathers(traced: Any) -> None:
    # A ring: float32 gradients are reduced in pieces, then the pieces gathered.
    sent = sending(traced({}))
    assert sent == pytest.approx(2 * (RANKS - 1) / RANKS * 4 * PARAMETERS, rel=0.02)
    # bfloat16 weights are gathered for each pass, and gradients are reduced to shards. The tail of the model (the
    # words and a norm) is kept after the forward pass.
    tail = (VOCABULARY + 1) * WIDTH
    sent = sending(traced(fsdp2()))
    assert sent == pytest.approx((RANKS - 1) / RANKS * 2 * (3 * PARAMETERS - tail), rel=0.02)


def test_a_worker_traces_one_engine_several_times_and_other_engines_run_apart(traced_once: Any, model: Path) -> None:
    plan = a_plan(zero(2)) if importlib.util.find_spec("deepspeed") else a_plan(fsdp2())
    request = a_request(plan, model)
    # The same trace by other words, in the same process.
    first, second = traced_once(request), traced_once(replace(request, layers=LAYERS))
    assert first is not second
    assert first.sections == second.sections

    plans = [a_plan({}), a_plan({}, processes=1), a_plan({}, processes=2), a_plan(fsdp2()), a_plan(zero(2))]
    assert len({library_patches_key(plan) for plan in plans}) == len(plans)


@pytest.mark.parametrize(
    ("args", "first", "others"),
    [
        # In bytes per parameter. A checkpoint has weights, which DDP saves in float32, and two states of the optimizer.
        # FSDP2 gathers either on the first rank alone (torch/distributed/_state_dict_utils.py, ranks_only).
        ({}, 4, 0),
        (fsdp2(), 8, 0),
        ({**fsdp2(), "save_only_model": True}, 4, 0),
        # Without checkpoints, TRL's scripts save the model after training, and FSDP2 saves none in shards.
        pytest.param({**fsdp2(), "save_strategy": "no"}, 4, 0, marks=pytest.mark.nightly),
        ({**fsdp2(state_dict_type="SHARDED_STATE_DICT"), "save_strategy": "no"}, 0, 0),
        (fsdp2(state_dict_type="SHARDED_STATE_DICT"), 8 / RANKS, 8 / RANKS),
        # Every rank copies all weights to the host, though only one writes them (accelerate, get_state_dict).
        pytest.param(zero(2), 2, 2, marks=needs_deepspeed),
        pytest.param(ZERO3, 2, 4 / RANKS, marks=needs_deepspeed),
    ],
    ids=["ddp", "fsdp2", "fsdp2 alone", "fsdp2 at the end", "unsaved", "fsdp2 in shards", "zero2", "zero3"],
)
def test_a_machine_holds_what_all_its_ranks_hold_while_they_save(
    traced: Any, args: dict[str, Any], first: float, others: float
) -> None:
    saving = section(traced(args), SAVE, Occurrence.AFTER)

    assert saving.host_bytes == pytest.approx(first * PARAMETERS, rel=0.1)
    assert saving.machine_bytes == pytest.approx((first + (RANKS - 1) * others) * PARAMETERS, rel=0.1)


def test_every_rank_of_a_machine_loads_the_weights_to_the_host_first(traced: Any) -> None:
    loading = section(traced(fsdp2()), CONSTRUCTION, Occurrence.BEFORE)
    assert max(loading.totals) < 4 * PARAMETERS
    assert loading.machine_bytes == RANKS * loading.host_bytes >= RANKS * 4 * PARAMETERS
    halves = section(traced(fsdp2(), machines=2), CONSTRUCTION, Occurrence.BEFORE)
    assert halves.machine_bytes == loading.machine_bytes / 2
