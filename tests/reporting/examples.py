"""Results made by hand: a run with a budget of 24 GiB."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.app.outcome import shorter_limits
from autotune.core.candidate import Candidate, Choice
from autotune.core.documents.length_report import histogram
from autotune.core.documents.memory_timeline import Mark, MemoryTimeline
from autotune.core.documents.result import Contribution, LaterFailure, MeasuredCandidate, Result, Trial
from autotune.core.documents.unsearched import ExcludedChoice, Unlockable
from autotune.core.machine import Hardware
from autotune.core.plan import TrainingPlan
from autotune.core.program import CONSTRUCTION, MICRO_BATCH, OPTIMIZER_STEP
from autotune.core.rows.lengths import LengthDistribution
from autotune.core.status import ProbeStatus, RunStatus
from autotune.core.timeline import Occurrence, Part
from autotune.core.workload import DatasetProfile, DatasetSource, ModelProfile, ModelSource, PackingCheck, Workload
from autotune.trainers import find_trainer
from autotune.trainers.length_limit import length_limit
from autotune.units import GIB
from tests.settings import setting

BASELINE = Candidate(
    {
        "attention": "sdpa",
        "gradient_checkpointing": "on",
        "lora": "none",
        "max_length": 1024,
        "packing": "none",
        "padding_free": "off",
        "per_device_train_batch_size": 8,
    }
)
WINNER = BASELINE.but(
    gradient_checkpointing="off", packing="bfd", max_length=2048, per_device_train_batch_size=4, lora="r16"
)
COUNTS = {12: 40, 90: 120, 180: 260, 350: 190, 700: 80, 1400: 9, 2900: 1}


def a_workload(**changes: Any) -> Workload:
    """A Qwen2 of half a billion weights on 700 rows of messages; ``changes`` are fields of the workload."""
    lengths = LengthDistribution(COUNTS)
    workload = Workload(
        trainer="sft",
        model_source=ModelSource("Qwen/Qwen2.5-0.5B"),
        dataset_source=DatasetSource("chats.jsonl", "json", "/data/chats.jsonl"),
        model=ModelProfile(
            name="Qwen/Qwen2.5-0.5B",
            model_type="qwen2",
            architecture="Qwen2ForCausalLM",
            parameters=494_032_768,
            layers=24,
            vocabulary=151_936,
            max_positions=32_768,
            linear_modules=("down_proj", "q_proj"),
            has_weights=None,
            fingerprint="m0",
        ),
        dataset=DatasetProfile(
            name="chats.jsonl",
            format="messages",
            columns=("messages",),
            lengths=lengths,
            trainable_tokens=150_000,
            tokenized_directory="/tokenized",
            fingerprint="d0",
        ),
        packing_checks={"sdpa": PackingCheck("sdpa", True, True, 1e-7, 1e-4)},
    )
    return replace(workload, **changes)


def a_timeline(scale_bytes: int = GIB, micro_batches: int = 2) -> MemoryTimeline:
    """A step of two micro-batches in a budget of 24 units, of which it needs 20, 16 of them for tensors."""
    first, further = (Part(MICRO_BATCH, occurrence) for occurrence in (Occurrence.FIRST, Occurrence.FURTHER))
    marks = (
        Mark(Part(CONSTRUCTION, Occurrence.BEFORE), False, 0),
        Mark(first, False, 1), Mark(first, True, 4), Mark(further, False, 7), Mark(further, True, 10),
        Mark(Part(OPTIMIZER_STEP, Occurrence.ONCE), False, 13),
    )  # fmt: skip
    units = {
        "parameter": (4,) * 15,
        "buffer": (1,) * 15,
        "gradient": (0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2),
        "optimizer state": (0,) + (3,) * 14,
        "activation": (0, 1, 2, 3, 3, 2, 1, 1, 2, 4, 4, 2, 1, 0, 0),
        "temporary": (0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 1, 1, 1, 1, 1),
    }
    breakdown = {
        "parameter": 4, "buffer": 1, "gradient": 2, "optimizer state": 3, "activation": 4, "temporary": 2,
        "rounding": 1, "fragmentation": 2, "context": 1,
    }  # fmt: skip
    return MemoryTimeline(
        marks=marks,
        levels={name: tuple(scale_bytes * size for size in sizes) for name, sizes in units.items()},
        peak=9,
        breakdown={name: scale_bytes * size for name, size in breakdown.items()},
        error=0.1,
        followed=True,
        micro_batches=micro_batches,
    )


def traced() -> Result:
    """The run of :func:`a_result`, in which the steps of both compared candidates were traced."""
    result = a_result()
    recommended, baseline = (
        one and replace(one, timeline=a_timeline(micro_batches=count))
        for one, count in ((result.recommended, 2), (result.baseline, 8))
    )
    return replace(result, recommended=recommended, baseline=baseline)


def a_choosable(number: int, candidate: Candidate, **changes: Any) -> MeasuredCandidate:
    """A candidate that ran at 10,000 tokens per second in 12 GiB; ``changes`` are fields."""
    choosable = MeasuredCandidate(
        number=number,
        candidate=candidate,
        plan=TrainingPlan("sft", {"packing": False, "max_length": 1024, "optim": "adamw_torch_fused"}, {}),
        status=ProbeStatus.OK,
        reason="",
        peak_bytes=12 * GIB,
        reserved_bytes=13 * GIB,
        device_bytes=14 * GIB,
        tokens_per_second=10_000.0,
        seconds_per_epoch=17.0,
        token_coverage=0.991,
        max_length=int(candidate["max_length"]),
        per_device_train_batch_size=int(candidate["per_device_train_batch_size"]),
        gradient_accumulation_steps=8 // int(candidate["per_device_train_batch_size"]),
        documents_per_step=8.0,
        steps_per_epoch=88,
        tokens_per_second_low=9_500.0,
        tokens_per_second_high=10_530.0,
        runs=5,
    )
    return replace(choosable, **changes)


def a_trial(number: int, candidate: Candidate, **changes: Any) -> Trial:
    """A trial that ran at 10,000 tokens per second in 12 GiB; ``changes`` are fields."""
    trial = Trial(number, candidate, ProbeStatus.OK, "", 10_000.0, 1.5, 9.0)
    return replace(trial, **{"peak_bytes": 12 * GIB, "reserved_bytes": 13 * GIB, **changes})


def failed(number: int, status: ProbeStatus, reason: str, **choices: Choice) -> Trial:
    """A trial without figures."""
    return Trial(number, BASELINE.but(**choices), status, reason, None, None, 4.0)


TRIALS = (
    a_trial(0, BASELINE),
    a_trial(1, BASELINE.but(packing="bfd"), tokens_per_second=15_400.0, peak_bytes=15 * GIB),
    failed(2, ProbeStatus.OUT_OF_MEMORY, "out of memory in backward", gradient_checkpointing="off"),
    a_trial(3, WINNER, tokens_per_second=23_000.0, peak_bytes=21 * GIB),
    a_trial(4, WINNER.but(gradient_checkpointing="on"), tokens_per_second=18_700.0, peak_bytes=16 * GIB),
    failed(5, ProbeStatus.VETOED, "probe 2 ran out of memory with less", per_device_train_batch_size=16),
    failed(6, ProbeStatus.VETOED, "probe 2 ran out of memory with less", per_device_train_batch_size=32),
    failed(7, ProbeStatus.CRASHED, "the process was ended by signal 9", attention="eager"),
    a_trial(8, WINNER, tokens_per_second=22_900.0, peak_bytes=21 * GIB),
)


def a_result(**changes: Any) -> Result:
    """A run that found packing without checkpointing to be 2.3 times faster; ``changes`` are fields."""
    result = Result(
        status=RunStatus.FOUND,
        trainer="sft",
        workload=a_workload(),
        hardware=Hardware(kind="cuda", name="NVIDIA A10G", memory_bytes=24 * GIB, processes=1, cores=8, driver="570"),
        environment={"torch": "2.13.0", "transformers": "5.23.0", "trl": "1.16.0", "optuna": "5.0.0", "driver": "570"},
        budget_bytes=24 * GIB,
        margin=0.05,
        global_batch_size=8,
        token_coverage=0.99,
        recommended=a_choosable(
            8,
            WINNER,
            plan=TrainingPlan(
                "sft",
                {"packing": True, "packing_strategy": "bfd", "max_length": 2048, "gradient_checkpointing": False},
                {"use_peft": True, "lora_r": 16, "dtype": "float32", "attn_implementation": "sdpa"},
            ),
            tokens_per_second=23_000.0,
            peak_bytes=21 * GIB,
            reserved_bytes=22 * GIB,
            device_bytes=23 * GIB,
            seconds_per_epoch=7.4,
            token_coverage=0.995,
            documents_per_step=52.4,
            steps_per_epoch=14,
            tokens_per_second_low=21_400.0,
            tokens_per_second_high=24_720.0,
            runs=6,
        ),
        baseline=a_choosable(0, BASELINE),
        speedup=2.3,
        contributions=(
            Contribution("packing", "bfd", "none", 3, ProbeStatus.OK, "", 1.84, -3 * GIB),
            Contribution("gradient_checkpointing", "off", "on", 4, ProbeStatus.OK, "", 1.23, -5 * GIB),
            Contribution("lora", "r16", "none", 9, ProbeStatus.OUT_OF_MEMORY, "out of memory in backward", None, None),
            Contribution("max_length", 2048, 1024, None, ProbeStatus.VETOED, "covers 97.1 % of the tokens", None, None),
        ),
        confirmed=True,
        trials=TRIALS,
        unlockable=(Unlockable("quantization", ("8bit", "4bit"), "rounds the frozen weights"),),
        left_out=(ExcludedChoice("attention", "flash_attention_2", "flash-attn is not installed"),),
        notes=("The driver reports 0.4 GiB in use by others.",),
        smallest_peak_bytes=12 * GIB,
        wall_seconds=312.0,
        output_directory="/runs/autotune-Qwen2.5-0.5B-chats",
        speedup_low=2.11,
        speedup_high=2.51,
        pairs=5,
    )
    return with_lengths(replace(result, **changes))


def with_lengths(result: Result) -> Result:
    """The same result with the lengths of its rows, and what the recommendation or shorter ones keep of them."""
    chosen, trainer, workload = result.recommended, find_trainer(result.trainer), result.workload
    return replace(
        result,
        lengths=histogram(workload.dataset.documents),
        limit=length_limit(trainer, setting(of=workload), chosen.candidate) if chosen else None,
        shorter=() if chosen else shorter_limits(result.trials, trainer, workload),
    )


def nothing_fits() -> Result:
    """A run whose budget was too small for every candidate."""
    trials = (
        failed(0, ProbeStatus.OUT_OF_MEMORY, "out of memory in backward"),
        failed(1, ProbeStatus.OUT_OF_MEMORY, "out of memory in construction", per_device_train_batch_size=1),
    )
    baseline = a_choosable(
        0,
        BASELINE,
        status=ProbeStatus.OUT_OF_MEMORY,
        reason="out of memory in backward",
        peak_bytes=None,
        reserved_bytes=None,
        device_bytes=None,
        tokens_per_second=None,
        seconds_per_epoch=None,
        documents_per_step=None,
        steps_per_epoch=None,
        tokens_per_second_low=None,
        tokens_per_second_high=None,
        runs=0,
    )
    return a_result(
        status=RunStatus.NOTHING_FITS,
        recommended=None,
        baseline=baseline,
        speedup=None,
        speedup_low=None,
        speedup_high=None,
        pairs=0,
        contributions=(),
        confirmed=False,
        trials=trials,
        budget_bytes=4 * GIB,
        smallest_peak_bytes=6 * GIB,
    )


def only_the_default_fits() -> Result:
    """A run on long rows, of which TRL's default keeps too few tokens; nothing else fits."""
    lengths = LengthDistribution({500: 60, 6000: 30, 8192: 10})
    workload = a_workload()
    workload = replace(workload, dataset=replace(workload.dataset, lengths=lengths))
    illegal = "max_length=1024 keeps 24.3 % of the dataset's tokens, and 99.0 % of the tokens were requested"
    ran_out = ProbeStatus.OUT_OF_MEMORY
    return with_lengths(
        replace(
            nothing_fits(),
            workload=workload,
            baseline=a_choosable(0, BASELINE, peak_bytes=10 * GIB, token_coverage=0.243),
            trials=(
                a_trial(0, BASELINE, peak_bytes=10 * GIB, illegal=illegal),
                failed(1, ran_out, "out of memory in backward", max_length=8192),
                failed(2, ran_out, "out of memory in backward", max_length=8192, per_device_train_batch_size=1),
                replace(failed(3, ProbeStatus.VETOED, illegal, liger="on"), illegal=illegal),
            ),
            budget_bytes=24 * GIB,
            smallest_peak_bytes=30 * GIB,
        )
    )


def interrupted() -> Result:
    """A run that was stopped after four trials, of which those that fit failed their longer run."""
    failure = LaterFailure(longer=True, status=ProbeStatus.OUT_OF_MEMORY, reason="in backward")
    trials = tuple(
        replace(trial, later_failure=failure if trial.status is ProbeStatus.OK else None) for trial in TRIALS[:4]
    )
    return a_result(
        status=RunStatus.INTERRUPTED, recommended=None, speedup=None, speedup_low=None, speedup_high=None, pairs=0,
        contributions=(), confirmed=False, trials=trials,
    )  # fmt: skip


def in_directory(result: Result, directory: Path) -> Result:
    """The same result with its bundle in ``directory``."""
    return replace(result, output_directory=str(directory))
