"""Traced peaks for the CPU against PyTorch's CPU allocator, on larger models than those of the tests.

Run ``python -m benchmarks.plan.virtual_cpu``; it prints a Markdown table, one row per case, and the median and worst
error.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from autotune.core.plan import TrainingPlan
from autotune.step.run.traced_training import traced_training
from autotune.step.run.virtual_trainer import STEPS, TracedRows
from autotune.virtual import trace
from autotune.virtual.steps.phases import step_name
from tests.small import small_tokenizer
from tests.virtual.models import ARCHITECTURES, config_of
from tests.virtual.reference import run_on_cpu

Steps = Callable[[Any], None]
_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
_LARGER = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "vocab_size": 8192}


def main() -> None:
    """Run every case and print the table."""
    parser = argparse.ArgumentParser(description="Traced against real peaks on the CPU.")
    parser.add_argument("--architecture", choices=ARCHITECTURES, action="append")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    arguments = parser.parse_args()
    errors = []
    print(
        "| architecture | weights | checkpointing | batch | real bytes | traced bytes | error | activations | trace |"
    )
    print("|---|---|---|---|--:|--:|--:|--:|--:|", flush=True)
    for architecture, lora, checkpointing in itertools.product(
        arguments.architecture or ARCHITECTURES, (False, True), (False, True)
    ):
        packing = lora != checkpointing
        started = time.perf_counter()
        steps = _steps(architecture, arguments.length, arguments.bf16, lora, checkpointing, packing)
        phase = trace(steps, target="cpu").phase(step_name(STEPS - 1))
        seconds = time.perf_counter() - started
        real = run_on_cpu(steps)[step_name(STEPS - 1)]
        traced = phase.device_peak.bytes
        error = traced / real.peak_bytes - 1
        errors.append(abs(error))
        words = ("LoRA" if lora else "full", "on" if checkpointing else "off", "packed" if packing else "padded")
        activations = phase.device_peak.categories.get("activation", 0)
        print(
            f"| {architecture} | {' | '.join(words)} | {real.peak_bytes:,} | {traced:,} | {error:+.4%} "
            f"| {activations / traced:.0%} | {seconds:.1f} s |",
            flush=True,
        )
    print(f"\n{len(errors)} cases, median error {median(errors):.4%}, worst {max(errors):.4%}")


def _steps(architecture: str, length: int, bf16: bool, lora: bool, checkpointing: bool, packing: bool) -> Steps:
    words: dict[str, Any] = {"use_peft": True, "lora_r": 16, "lora_target_modules": "all-linear"} if lora else {}
    if lora and "moe" in architecture:
        words |= {"lora_target_modules": _ATTENTION}
    args = {
        "per_device_train_batch_size": 4,
        "max_length": length,
        "bf16": bf16,
        "packing": packing,
        "gradient_checkpointing": checkpointing,
    }
    rows = [(length * quarters // 4,) for quarters in (4, 3, 2, 1)] * 2
    plan = TrainingPlan("sft", args=args, model=words)
    return traced_training(plan, config_of(architecture, **_LARGER), small_tokenizer(), TracedRows(rows))


if __name__ == "__main__":
    main()
