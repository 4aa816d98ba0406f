"""Probes of a small Llama by real jobs: their measurements, and real out-of-memory errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.core.measurement import Measurement, Schedule
from autotune.core.plan import TrainingPlan
from autotune.core.program import CONSTRUCTION, FORWARD, OPTIMIZER_STEP
from autotune.core.status import ProbeStatus
from autotune.core.workload import Workload
from autotune.errors import InputError
from autotune.probing import JobServer, probe
from autotune.units import MIB
from tests.step.requests import plan, probe_request, probed_here, token_workload

Prober = Callable[..., Measurement]
LORA = {"use_peft": True, "lora_target_modules": "all-linear", "lora_r": 4}


@pytest.fixture
def prober(job_server: JobServer, small_workload: Workload, tmp_path: Path) -> Prober:
    """Run probes of the small workload, or of another."""

    def run(training_plan: TrainingPlan, workload: Workload = small_workload, **request: Any) -> Measurement:
        folder = tmp_path / f"probe-{len(list(tmp_path.iterdir()))}"
        return probe(job_server, probe_request(workload, training_plan, **request), folder, timeout_seconds=120.0)

    return run


@pytest.fixture
def prober_here(small_workload: Workload, tmp_path: Path) -> Prober:
    """Run probes in this process, for all that they measure but memory."""

    def run(training_plan: TrainingPlan, workload: Workload = small_workload, **request: Any) -> Measurement:
        folder = tmp_path / f"probe-{len(list(tmp_path.iterdir()))}"
        return probed_here(probe_request(workload, training_plan, **request), folder)

    return run


@pytest.fixture
def workload_of(tmp_path: Path) -> Callable[..., Workload]:
    """Prepare a workload of pre-tokenised rows of given lengths, for a model of given size."""

    def make(lengths: list[int], **config: Any) -> Workload:
        return token_workload(tmp_path / f"workload-{len(list(tmp_path.iterdir()))}", lengths, **config)

    return make


@pytest.mark.parametrize(
    ("args", "model", "truncate_to"),
    [
        ({}, {}, None),
        ({"packing": True}, {}, None),
        ({"padding_free": True, "max_length": None}, {}, 64),
        ({"optim": "adamw_8bit"}, {**LORA, "use_dora": True}, None),
        ({}, {**LORA, "load_in_4bit": True, "dtype": "bfloat16"}, None),
        *(
            pytest.param(args, model, None, marks=pytest.mark.nightly)
            for args, model in [
                (
                    {"gradient_checkpointing": False, "optim": "sgd"},
                    {"dtype": "bfloat16", "attn_implementation": "eager"},
                ),
                ({"packing": True, "packing_strategy": "bfd_split"}, {}),
                ({"packing": True, "packing_strategy": "wrapped"}, {}),
                ({"pad_to_multiple_of": 8}, LORA),
                ({}, {**LORA, "load_in_8bit": True, "dtype": "bfloat16"}),
            ]
        ),
    ],
    ids=lambda value: ",".join(f"{key}={item}" for key, item in value.items()) if isinstance(value, Mapping) else None,
)
def test_techniques_run_in_a_probe(
    prober: Prober, args: dict[str, object], model: dict[str, object], truncate_to: int | None
) -> None:
    measurement = prober(plan(args, model, truncate_to=truncate_to))
    assert measurement.status is ProbeStatus.OK, measurement.reason
    assert measurement.peak_bytes is not None
    assert measurement.peak_bytes > 0
    assert measurement.micro_batches_timed == 2
    assert (measurement.worst_rows, measurement.worst_tokens) == (2, 128)


@pytest.mark.parametrize("model", [{}, {**LORA, "load_in_4bit": True}], ids=["full", "4-bit"])
def test_random_and_pretrained_weights_need_the_same_memory(prober: Prober, model: dict[str, object]) -> None:
    training_plan = plan({}, {"dtype": "bfloat16", **model})
    random, pretrained = prober(training_plan), prober(training_plan, init="pretrained")
    assert random.ok
    assert pretrained.ok
    assert random.peak_bytes == pytest.approx(pretrained.peak_bytes, abs=16 * MIB)


@pytest.mark.parametrize("made_again", [False, True])
def test_rows_that_were_removed_are_no_result_of_a_candidate(
    job_server: JobServer, small_workload: Workload, tmp_path: Path, made_again: bool
) -> None:
    request = replace(probe_request(small_workload, plan()), tokenized_directory=str(tmp_path / "gone"))
    if made_again:
        (tmp_path / "gone").mkdir()
    with pytest.raises(InputError, match=f"The tokenised rows in {tmp_path / 'gone'} were removed. Continue with"):
        probe(job_server, request, tmp_path / "probe")


@pytest.mark.nightly
def test_a_probe_in_a_new_interpreter_shows_the_same(prober: Prober, small_workload: Workload, tmp_path: Path) -> None:
    forked = prober(plan())
    with JobServer("cpu", spawn=True) as server:
        spawned = probe(server, probe_request(small_workload, plan()), tmp_path / "spawned")
    assert spawned.ok
    assert spawned.peak_bytes == pytest.approx(forked.peak_bytes, abs=32 * MIB)
    assert spawned.tokens_per_step == forked.tokens_per_step


def test_the_order_of_times_is_from_request_to_first_step_to_reply(prober: Prober) -> None:
    measurement = prober(plan())
    assert measurement.start_seconds is not None
    assert measurement.training_seconds is not None
    assert measurement.start_seconds > 0
    assert measurement.start_seconds + measurement.training_seconds < measurement.wall_seconds


def test_each_whole_step_counts_the_datasets_tokens_and_no_padding(
    prober_here: Prober, workload_of: Callable[..., Workload]
) -> None:
    lengths = [3, 70, 5, 8, 11, 64, 9, 2, 30, 40, 6, 7]
    workload = workload_of(lengths)
    measurement = prober_here(plan(rows=2, micro_batches=2), workload)
    assert measurement.tokens_per_step == sum(min(length, 64) for length in lengths) / 3
    assert measurement.documents_per_step == 4
    assert measurement.rows == 12
    assert measurement.tokens_per_second is not None
    assert measurement.tokens_per_second > 0
    untruncated = prober_here(plan({"max_length": None}, rows=2, micro_batches=2), workload)
    assert untruncated.tokens_per_step == sum(lengths) / 3
    assert untruncated.worst_tokens == 2 * 70


@pytest.mark.parametrize(
    ("strategy", "bins", "tokens"),
    # 64 + 50+14 + 40+20 (of the row of 70, bfd drops 6 tokens, and the others keep them in a bin of their own)
    [("bfd", 3, 188), ("bfd_split", 4, 194), ("wrapped", 4, 194)],
)
def test_packed_rows_count_the_documents_that_they_hold(
    prober_here: Prober, workload_of: Callable[..., Workload], strategy: str, bins: int, tokens: int
) -> None:
    workload = workload_of([70, 50, 14, 40, 20])
    measurement = prober_here(plan({"packing": True, "packing_strategy": strategy}, rows=1), workload)
    assert measurement.rows == bins
    assert measurement.tokens_per_step == tokens / bins
    assert measurement.documents_per_step == pytest.approx(5 / bins)


def test_timing_goes_on_until_the_rate_is_known_or_the_time_is_up(prober_here: Prober) -> None:
    easy = Schedule(min_micro_batches=3, max_seconds=60.0, target_error=100.0)
    assert prober_here(plan(), schedule=easy).micro_batches_timed == 3
    hard = replace(easy, max_micro_batches=200, max_seconds=0.3, target_error=0.0)
    assert 3 <= prober_here(plan(), schedule=hard).micro_batches_timed < 200


def test_a_probe_near_its_time_limit_times_one_step_and_has_a_rate(prober_here: Prober) -> None:
    measurement = prober_here(plan(), schedule=Schedule(min_micro_batches=50, latest_seconds=0.0))
    assert measurement.ok
    assert measurement.micro_batches_timed <= 2
    assert measurement.tokens_per_second is not None


def test_a_step_is_put_together_from_micro_batches_and_one_update(prober_here: Prober) -> None:
    shown = prober_here(plan(rows=2, micro_batches=64))
    assert shown.step_seconds is not None
    assert shown.micro_batch_seconds is not None
    assert shown.update_seconds is not None
    assert shown.training_seconds is not None
    assert shown.loading_seconds is not None
    assert shown.step_seconds == pytest.approx(64 * shown.micro_batch_seconds + shown.update_seconds)
    # It is part of the micro-batches' time, however slow the disk is.
    assert 0 < shown.loading_seconds < 64 * shown.micro_batch_seconds
    assert shown.tokens_per_step is not None
    assert shown.tokens_per_second == pytest.approx(shown.tokens_per_step / shown.step_seconds)
    assert shown.documents_per_step == 128


def test_a_larger_batch_and_no_checkpointing_need_more_memory(
    prober: Prober, workload_of: Callable[..., Workload]
) -> None:
    workload = workload_of([512] * 8, hidden_size=128, num_hidden_layers=4)
    peaks = []
    for rows, checkpointing in ((1, True), (4, True), (4, False)):
        args = {"max_length": None, "gradient_checkpointing": checkpointing}
        measurement = prober(plan(args, rows=rows), workload)
        assert measurement.peak_bytes is not None
        peaks.append(measurement.peak_bytes)
    # Resident memory of equal probes differs by some MiB.
    assert peaks[0] < peaks[1] < peaks[2]


@pytest.mark.parametrize(
    ("phase", "lengths", "config", "limit_bytes"),
    [
        # 4 * 8 MiB of weights in the embedding alone
        (CONSTRUCTION, [8] * 4, {"vocab_size": 32768, "hidden_size": 256}, 24 * MIB),
        # 2048 * 2048 scores for each of 4 heads and 2 rows
        (FORWARD, [2048] * 4, {}, 64 * MIB),
    ],
)
def test_running_out_of_memory_is_real_and_tells_where(
    prober: Prober,
    workload_of: Callable[..., Workload],
    phase: str,
    lengths: list[int],
    config: dict[str, int],
    limit_bytes: int,
) -> None:
    args = {"max_length": None, "gradient_checkpointing": False}
    workload = workload_of(lengths, **config)
    measurement = prober(plan(args, {"attn_implementation": "eager"}), workload, limit_bytes=limit_bytes)
    assert measurement.status is ProbeStatus.OUT_OF_MEMORY, measurement
    found = measurement.out_of_memory
    assert found is not None
    assert found.phase == phase
    assert found.limit_bytes == limit_bytes
    assert found.requested_bytes is not None
    assert found.requested_bytes >= MIB
    assert found.used_bytes is not None
    assert found.used_bytes < limit_bytes + 16 * MIB
    assert measurement.reason.startswith(f"in {phase}: ")
    assert measurement.peak_bytes is None


def test_optimizer_state_that_does_not_fit_fails_in_the_optimizer_step(
    prober: Prober, workload_of: Callable[..., Workload]
) -> None:
    # 54 MiB of weights and as much of gradients fit; AdamW's two moments, 108 MiB, do not.
    workload = workload_of([8] * 4, hidden_size=512, intermediate_size=4096)
    measurement = prober(plan(rows=1), workload, limit_bytes=180 * MIB)
    assert measurement.status is ProbeStatus.OUT_OF_MEMORY, measurement
    assert measurement.out_of_memory is not None
    assert measurement.out_of_memory.phase == OPTIMIZER_STEP


def test_a_limit_that_suffices_changes_nothing(prober: Prober) -> None:
    assert prober(plan(), limit_bytes=1024 * MIB).ok


@pytest.mark.parametrize(
    ("args", "model", "reason"),
    [
        ({}, {"attn_implementation": "flash_attention_2"}, "in construction: ImportError: FlashAttention2"),
        ({"padding_free": True}, {}, "in construction: ValueError: When `padding_free=True` without packing"),
        ({"packing": True, "max_length": None}, {}, "in construction: ValueError: When packing is enabled"),
    ],
)
def test_what_trl_refuses_is_unsupported_in_trls_words(
    prober_here: Prober, args: dict[str, object], model: dict[str, object], reason: str
) -> None:
    measurement = prober_here(plan(args, model))
    assert measurement.status is ProbeStatus.UNSUPPORTED
    assert measurement.reason.startswith(reason)


def test_an_error_that_is_no_refusal_is_a_crash(prober: Prober) -> None:
    measurement = prober(plan({"use_liger_kernel": True}))  # Triton has no driver for a CPU
    assert measurement.status is ProbeStatus.CRASHED
    assert "active drivers" in measurement.reason


def test_what_trl_cuts_and_packs_is_shared_by_later_probes(prober_here: Prober, small_workload: Workload) -> None:
    directory = Path(small_workload.dataset.tokenized_directory)
    training_plan = plan({"packing": True, "max_length": 48})
    assert prober_here(training_plan).ok
    files = sorted(directory.iterdir())
    assert any(file.name.startswith("cache-") for file in files)
    assert prober_here(training_plan).ok
    assert sorted(directory.iterdir()) == files
