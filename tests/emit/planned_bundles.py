"""Documents of planned bundles, made by hand: two GPUs that train, with or without two that generate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autotune.core.candidate import Candidate
from autotune.core.documents.bundle import Basis, PlannedBundle, ServerSplit
from autotune.core.plan import Completions, Launch, TrainingPlan
from autotune.emit.serving import serve_command, with_server_address
from autotune.units import GIB

MODEL = "Qwen/Qwen2.5-0.5B"
ARGS = {
    "bf16": False, "gradient_accumulation_steps": 1, "max_completion_length": 16, "num_generations": 2,
    "per_device_train_batch_size": 2, "use_cpu": True,
}  # fmt: skip
SPLIT = ServerSplit(2, 2, 72 * GIB, 60 * GIB, 300.0, serve_command(MODEL, 2, 48), training_seconds=1.5)


def a_bundle(split: ServerSplit | None = SPLIT, trainer: str = "grpo", **changes: Any) -> PlannedBundle:
    """Return the document of a training on two GPUs, beside two of a server or without one."""
    plan = TrainingPlan(trainer, ARGS, launch=Launch(2), rewards=("my_rewards.length",), completions=Completions(8, 12))
    if split is not None:
        plan = with_server_address(replace(plan, args={**ARGS, "use_vllm": True, "vllm_mode": "server"}))
    document = PlannedBundle(
        basis=Basis.PLANNED,
        directory="",
        trainer=trainer,
        model=MODEL,
        dataset="chats.jsonl",
        device="H100-SXM",
        processes=2,
        budget_bytes=79 * GIB,
        global_batch_size=16,
        candidate=Candidate({"liger": "off"}),
        plan=plan,
        needed_bytes=20 * GIB,
        error=0.1,
        spare_bytes=59 * GIB,
        tokens_per_second=9000.0 if split is None else None,
        server=split,
        environment={"torch": "2.13.0", "trl": "1.16.0"},
    )
    return replace(document, **changes)
