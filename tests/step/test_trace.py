"""The job ``trace`` through the job server: its reply on TRL's own step, without a GPU."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.core.gpu import AchievedRates
from autotune.core.jobs.traced import TraceReply, TraceRequest
from autotune.core.plan import TrainingPlan
from autotune.core.program import OPTIMIZER_STEP, SAVE
from autotune.core.step_time import USUAL_PACE
from autotune.core.timeline import Occurrence, Part
from autotune.core.workload import ModelSource
from autotune.errors import AutotuneError, InputError
from autotune.inspection.gpus import find_gpu
from autotune.planning.extrapolation.fit import Fit
from autotune.probing import JobServer, trace
from autotune.probing.server import Worker
from autotune.probing.tracing import ServerTracer
from autotune.step.job import JobContext
from autotune.step.jobs.trace import trace as trace_in_this_process
from autotune.techniques.traits import library_patches_key
from autotune.units import MIB
from tests.small import write_small_model

LORA: dict[str, Any] = {"use_peft": True, "lora_r": 8, "lora_target_modules": "all-linear"}
LAYERS = 4


def a_request(
    model: Path, args: Mapping[str, object] | None = None, words: Mapping[str, object] | None = None
) -> TraceRequest:
    """Return the request of a plan: trainer arguments and model words."""
    shape = {"per_device_train_batch_size": 2, "max_length": 128, "gradient_checkpointing": False, "bf16": True}
    return TraceRequest(
        plan=TrainingPlan("sft", {**shape, **(args or {})}, words or {}),
        model=ModelSource(str(model)),
        target="cuda",
        worst=((120,), (100,)),
        gpu=find_gpu("A100-80GB"),
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 4 layers whose peak is not that of the vocabulary's logits."""
    directory = tmp_path_factory.mktemp("traced") / "model"
    return write_small_model(
        directory, weights=False, num_hidden_layers=LAYERS, hidden_size=256, intermediate_size=1024
    )


@pytest.fixture(scope="module")
def run(traced_once: Any, model: Path) -> Any:
    """A function that traces a plan, once: trainer arguments, model words, and further fields of the request."""
    return lambda args=None, words=None, **more: traced_once(replace(a_request(model, args, words), **more))


def test_the_parts_of_the_peak_sum_to_it_and_the_allocator_holds_more(run: Any) -> None:
    reply = run()

    assert sum(reply.device.categories.values()) == reply.device.bytes
    replayed = reply.replayed()
    assert reply.device.bytes < replayed.allocated_bytes < replayed.reserved_bytes
    assert replayed.allocated_bytes <= replayed.needed_bytes <= replayed.reserved_bytes
    assert (reply.worst_rows, reply.worst_tokens) == (2, 240)


def test_the_peak_of_many_layers_follows_from_those_of_few(run: Any) -> None:
    two, three, four = (run(layers=count).device.bytes for count in (2, 3, LAYERS))

    assert two + 2 * (three - two) == pytest.approx(four, rel=0.005)


def test_what_other_lengths_add_is_said_where_it_is_asked_for(run: Any) -> None:
    assert [found.varied_bytes for found in run().own.replays] == [None, None]
    asked = run(varied=True).own.replays
    assert all(found.varied_bytes >= 0 for found in asked)
    assert tuple(replace(found, varied_bytes=None) for found in asked) == run().own.replays


def seconds_of(reply: TraceReply, figure: str) -> float:
    """Return the sum of a figure over the parts of a step that was traced."""
    return sum(float(getattr(section.time, figure)) for section in reply.sections if section.time is not None)


def test_padding_that_the_loss_leaves_out_costs_what_it_costs_in_real_rows(run: Any) -> None:
    gpu = find_gpu("A100-80GB")
    assert gpu.speeds is not None
    # Products take as long as they have operations.
    slow = replace(gpu, speeds=replace(gpu.speeds, fp32=1e9, bf16=1e9, achieved=AchievedRates()))
    real = seconds_of(run(worst=((120,), (40,)), layers=2, gpu=slow), "matmul_seconds")
    # The same tokens for the loss, in rows that are nearly as wide as the widest.
    replies = (run(worst=((120,), (119,)), trainable=share, layers=2, gpu=slow) for share in (160 / 240, 1.0))
    spread, full = (seconds_of(reply, "matmul_seconds") for reply in replies)

    assert spread == pytest.approx(real, rel=0.002)
    assert full > 1.01 * real


def test_a_step_takes_longer_the_more_micro_batches_it_has(run: Any) -> None:
    counts = (2, 8)
    steps = [run({"gradient_accumulation_steps": count}, worst=((60,), (40,)), layers=2) for count in counts]
    forecasts = [Fit({2: reply}, 2).forecast(count) for reply, count in zip(steps, counts, strict=True)]
    times = [found.step(count) for found, count in zip(forecasts, counts, strict=True)]
    seconds = [0.0 if time is None else time.seconds for time in times]

    assert steps[1].tokens_per_step == 4 * steps[0].tokens_per_step == 800
    # Further micro-batches take a little more than the first: they add to its gradients.
    assert 3 < seconds[1] / seconds[0] < 4.1
    assert steps[1].device.bytes == steps[0].device.bytes


def test_without_the_speeds_of_a_gpu_no_time_is_told(run: Any) -> None:
    assert set(run(gpu=None).own.times) == {None}


def test_a_host_whose_time_for_an_operator_was_measured_takes_that_time(run: Any) -> None:
    gpu = find_gpu("A100-80GB")
    assert gpu.speeds is not None
    slow = replace(gpu, speeds=replace(gpu.speeds, launch_seconds=3 * USUAL_PACE.launch_seconds))
    found, usual = (seconds_of(reply, "launch_seconds") for reply in (run(gpu=slow), run()))
    assert found == pytest.approx(3 * usual)


def test_on_the_cpu_tensors_are_all_there_is(run: Any) -> None:
    reply = run({"bf16": False}, target="cpu", gpu=None)

    replayed = reply.replayed()
    assert replayed.allocated_bytes == reply.device.bytes
    assert replayed.reserved_bytes is None


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"gradient_checkpointing": True}, {}),
        ({"activation_offloading": True}, {}),
        ({"optim": "adafactor"}, {}),
        ({"optim": "adamw_bnb_8bit"}, {}),
        ({}, LORA),
        ({}, {"attn_implementation": "flash_attention_2"}),
        *(
            pytest.param(args, words, marks=pytest.mark.nightly)
            for args, words in [
                ({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}, {}),
                ({"optim": "sgd"}, {}),
                ({"optim": "paged_adamw_8bit"}, {}),
                ({}, {"dtype": "bfloat16"}),
                ({}, {"attn_implementation": "kernels-community/vllm-flash-attn3", "dtype": "bfloat16"}),
            ]
        ),
    ],
    ids=str,
)
def test_what_saves_memory_is_seen_to(run: Any, args: dict[str, Any], words: dict[str, Any]) -> None:
    assert run(args, words).device.bytes < run().device.bytes


@pytest.mark.parametrize(
    ("words", "bits_per_weight"),
    [({"load_in_8bit": True}, 8), ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, 4.5)],
    ids=["8bit", "4bit"],
)
def test_quantised_weights_have_the_bits_that_they_are_stored_in(
    run: Any, words: dict[str, Any], bits_per_weight: float
) -> None:
    bf16 = {**LORA, "dtype": "bfloat16"}
    plain, quantised = (run({}, model).device.categories["parameter"] for model in (bf16, {**bf16, **words}))

    # Queries and output are square, keys and values half as wide; three are the feed-forward's.
    weights = LAYERS * (3 * 256 * 256 + 3 * 256 * 1024)
    # TRL holds the adapters of a quantised model in bfloat16, PEFT those of others in float32.
    adapters = LAYERS * LORA["lora_r"] * (2 * 512 + 2 * 384 + 3 * 1280)
    assert plain - quantised == pytest.approx(weights * (16 - bits_per_weight) / 8 + 2 * adapters, rel=0.02)


def test_offloaded_activations_lie_on_the_host(run: Any) -> None:
    plain, offloaded = run(), run({"activation_offloading": True})
    moved = plain.device.categories["activation"] - offloaded.device.categories["activation"]

    # In the steps: a save copies all weights to the host.
    in_steps = [
        max(section.host_bytes for section in reply.sections if section.part.of_micro_batch)
        for reply in (plain, offloaded)
    ]
    assert in_steps[1] - in_steps[0] >= 0.9 * moved > 0


def test_a_save_copies_the_weights_to_the_host_and_holds_on_the_device_what_a_step_leaves(run: Any) -> None:
    reply = run()
    saving = reply.sections[-1]
    assert saving.part == Part(SAVE, Occurrence.AFTER)
    assert saving.host_bytes == reply.device.categories["parameter"]
    assert saving.levels.keys() >= {"parameter", "optimizer state"}
    assert "gradient" not in saving.levels


def test_paged_optimizer_state_lies_on_the_host(run: Any) -> None:
    plain, paged = run(), run({"optim": "paged_adamw_32bit"})

    assert paged.host.bytes - plain.host.bytes == pytest.approx(
        plain.device.categories["optimizer state"] - paged.device.categories["optimizer state"], rel=0.01
    )


def test_flash_attention_keeps_packed_rows_without_a_mask(run: Any) -> None:
    rows = {"worst": ((120,), (60,), (60,)), "layers": 2}
    masked, flash = (
        run({"packing": True}, {"attn_implementation": name, "dtype": "bfloat16"}, **rows)
        for name in ("sdpa", "flash_attention_2")
    )

    assert flash.worst_tokens == masked.worst_tokens
    assert flash.device.bytes < masked.device.bytes


def test_a_compiled_step_and_kernels_of_the_hub_are_assumptions_of_a_trace(run: Any) -> None:
    args = {"torch_compile": True, "torch_compile_mode": "max-autotune", "model_init_kwargs": {"use_kernels": True}}
    assumptions = run(args).assumptions
    assert "a compiled step needs what the same step needs uncompiled" in assumptions
    assert "kernels of the Hub need what the layers need that they replace" in assumptions


def test_what_cannot_be_traced_is_named(job_server: JobServer, model: Path, tmp_path: Path) -> None:
    with pytest.raises(AutotuneError, match="lomo"):
        trace(job_server, a_request(model, {"optim": "lomo"}), tmp_path / "refused")


def test_a_model_that_is_not_there_is_the_users_to_mend(run: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be loaded"):
        run(model=ModelSource(str(tmp_path / "nowhere")))


def test_a_trace_writes_to_the_folder_of_its_job_alone_so_that_nothing_is_left_of_one_that_is_killed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    assert trace_in_this_process(a_request(model), JobContext(tmp_path, time.monotonic())).device.bytes


def test_what_one_trace_does_to_its_process_does_not_reach_the_next(tracer: ServerTracer, model: Path) -> None:
    given = ({"learning_rate": 1e-5}, {"use_liger_kernel": True}, {"learning_rate": 2e-5})
    replies = tracer([replace(a_request(model, args), layers=2) for args in given])

    before, fused, after = (reply.device for reply in replies if isinstance(reply, TraceReply))
    assert before == after != fused


def traced_in_one_process(worker: Worker, requests: list[TraceRequest], folder: Path) -> list[TraceReply]:
    return [trace(worker, each, folder / f"in-one-process-{number}") for number, each in enumerate(requests)]


@pytest.mark.nightly
def test_what_changes_no_library_is_traced_beside_others_as_it_is_alone(
    job_server: JobServer, worker: Worker, model: Path, tmp_path: Path
) -> None:
    plans: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"activation_offloading": True}, {}),
        ({"optim": "adamw_bnb_8bit"}, LORA),
        (
            {"gradient_checkpointing": True, "optim": "adafactor"},
            {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "use_dora": True, **LORA},
        ),
        ({"bf16": False, "fp16": True}, {"attn_implementation": "flash_attention_2"}),
        ({}, {"dtype": "bfloat16", "attn_implementation": "flex_attention"}),
        ({"activation_offloading": True}, {}),
    ]
    requests = [replace(a_request(model, args, words), layers=2) for args, words in plans]

    replies = traced_in_one_process(worker, requests, tmp_path)

    assert len({library_patches_key(request.plan) for request in requests}) == 1
    for number, (request, reply) in enumerate(zip(requests, replies, strict=True)):
        alone = trace(job_server, request, tmp_path / f"alone-{number}")
        assert replace(reply, seconds=0.0) == replace(alone, seconds=0.0)


def test_a_reference_model_has_no_kernels_of_liger_in_any_trace_of_a_process(
    worker: Worker, model: Path, tmp_path: Path
) -> None:
    shape = {"per_device_train_batch_size": 2, "max_length": 128, "bf16": True, "use_liger_kernel": True}
    plan = TrainingPlan("dpo", shape)
    request = replace(a_request(model), plan=plan, worst=((20, 100, 100), (20, 80, 80)), layers=2)

    replies = traced_in_one_process(worker, [request, request], tmp_path)

    first, second = (replace(reply, seconds=0.0) for reply in replies)
    assert first == second


@pytest.mark.parametrize(
    ("refused", "by_name"),
    [({}, "lora_dropout"), pytest.param({"use_dora": True}, "use_dora", marks=pytest.mark.nightly)],
)
def test_peft_wants_adapters_of_fused_experts_without_dropout_or_dora(
    job_server: JobServer, tmp_path: Path, refused: dict[str, Any], by_name: str
) -> None:
    model = write_small_model(tmp_path / "model", "qwen3_moe", weights=False)
    without = {**LORA, "lora_dropout": 0.0}

    trace(job_server, a_request(model, {}, without), tmp_path / "without")
    with pytest.raises(AutotuneError, match=by_name):
        trace(job_server, a_request(model, {}, {**without, **refused} if refused else LORA), tmp_path / "refused")


def test_tied_embeddings_are_held_once(run: Any, tmp_path: Path) -> None:
    held = []
    for tied in (False, True):
        directory = write_small_model(
            tmp_path / str(tied), weights=False, tie_word_embeddings=tied, hidden_size=64, vocab_size=512
        )
        held.append(run(model=ModelSource(str(directory))).device.categories["parameter"])

    assert held[0] - held[1] == 4 * 512 * 64


def test_an_optimizer_that_takes_all_parameters_at_once_holds_as_much_again(run: Any) -> None:
    fused, at_once = (
        next(section for section in run({"optim": name}, layers=2).sections if section.part.phase == OPTIMIZER_STEP)
        for name in ("adamw_torch_fused", "adamw_torch")
    )

    parameters = max(at_once.levels["parameter"])
    assert max(at_once.levels["temporary"]) - max(fused.levels["temporary"]) == pytest.approx(parameters, rel=0.05)


def test_a_cache_that_is_emptied_before_every_backward_pass_holds_no_more(run: Any) -> None:
    for kept, emptied in zip(run().own.replays, run(emptied=True).own.replays, strict=True):
        assert emptied.allocated_bytes == kept.allocated_bytes
        assert emptied.reserved_bytes <= kept.reserved_bytes


def test_growing_segments_save_what_fixed_ones_lose_by_rounding_a_large_tensor_up(run: Any, tmp_path: Path) -> None:
    width, inner = 512, 5635
    # PyTorch gives a tensor of at least 10 MiB a segment of its own, in steps of 2 MiB, and keeps a rest of up to 1 MiB
    # with it. The weights come first, before any free block that others could lie in without a loss.
    weight_bytes, segment_bytes = 4 * width * inner, 12 * MIB
    assert segment_bytes - MIB < weight_bytes < segment_bytes
    lost_bytes = LAYERS * 3 * (segment_bytes - weight_bytes)
    source = write_small_model(
        tmp_path / "model", weights=False, num_hidden_layers=LAYERS, hidden_size=width, intermediate_size=inner
    )

    reply = run(model=ModelSource(str(source)))

    fixed, growing = (reply.replayed(grown) for grown in (False, True))
    assert reply.device.bytes < growing.allocated_bytes <= fixed.allocated_bytes - lost_bytes
    assert growing.reserved_bytes <= fixed.reserved_bytes - lost_bytes


def test_a_cpu_has_no_use_of_an_allocator_to_choose(run: Any) -> None:
    reply = run(target="cpu", gpu=None)

    assert reply.own.replays == ()
    assert reply.replayed().allocated_bytes == reply.device.bytes


def test_a_trace_says_of_every_gpu_with_the_same_kernels_what_a_trace_for_that_gpu_says(run: Any) -> None:
    others = tuple(map(find_gpu, ("RTX4090", "RTX5090", "H200", "T4")))
    in_half = run(others=others, layers=2)
    assert [figures.capability for figures in in_half.gpus] == [(8, 0), (8, 9), (12, 0)]
    in_full = run({"bf16": False}, others=others, layers=2)
    assert [figures.capability for figures in in_full.gpus] == [(8, 0), (8, 9), (12, 0), (9, 0), (7, 5)]
    for shared, args in ((in_half, {}), (in_full, {"bf16": False})):
        for figures, gpu in zip(shared.gpus, (find_gpu("A100-80GB"), *others), strict=False):
            other = gpu if gpu.compute_capability == figures.capability else find_gpu("T4")
            alone = run(args, gpu=other, layers=2)
            assert alone.gpus == (figures,)
            assert [section.levels for section in alone.sections] == [section.levels for section in shared.sections]
            assert (alone.device, alone.host) == (shared.device, shared.host)
