"""A trace runs few of the decoding steps: its figures equal those of a trace of every step."""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from autotune.core.jobs.traced import TraceReply, TraceRequest
from autotune.core.plan import Launch, TrainingPlan
from autotune.core.workload import ModelSource
from autotune.inspection.gpus import find_gpu
from autotune.probing import JobServer
from autotune.trainers.prompts import GENERATION, NO_REWARD
from tests.small import write_small_model
from tests.step.plans import fsdp2, needs_deepspeed, zero
from tests.virtual.alone import apart

RANKS, ROWS, PROMPT, TOKENS = 2, 4, 48, 12
# Two are padded: attention then gets a mask in every step.
PROMPTS = ((PROMPT, TOKENS), (PROMPT - 1, TOKENS)) * (ROWS // 2)
# The prompt, a step half-way, and the last two.
RUN = 4
GRPO: Mapping[str, object] = {"num_generations": ROWS // 2, "max_completion_length": TOKENS}
# The ids and the mask of tokens that count as generated are held twice; they are no share of the peak of such a model.
WIDE: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 768}
pytestmark = pytest.mark.slow


def trace_both_ways(request: TraceRequest, folder: Path) -> list[tuple[TraceReply, int]]:
    """Return the reply to a request, and one for which every token was generated; each with its forward passes."""
    from autotune.step.job import JobContext
    from autotune.step.run import traced_training

    job: Any = importlib.import_module("autotune.step.jobs.trace")
    run, passes = job.run_virtually, []

    def traced(*args: Any, **kwargs: Any) -> Any:
        made = run(*args, **kwargs)
        phase = next(phase for phase in made.phases if phase.name == GENERATION)
        ran = made.operators[phase.first_operator : phase.end_operator]
        passes.append(sum(operator.name == "aten.embedding.default" for operator in ran))
        return made

    replies: list[TraceReply] = []
    for patch in (nullcontext(), mock.patch.object(traced_training, "short_generation", nullcontext)):
        with patch, mock.patch.object(job, "run_virtually", traced):
            replies.append(job.trace(request, JobContext(folder, time.monotonic())))
    return list(zip(replies, passes, strict=True))


@pytest.mark.parametrize(
    ("trainer", "args", "ranks", "attention"),
    [
        ("grpo", GRPO, 1, "flash_attention_2"),
        pytest.param("grpo", GRPO, 1, "sdpa", marks=pytest.mark.nightly),
        pytest.param("grpo", {**GRPO, **fsdp2()}, RANKS, "sdpa", marks=pytest.mark.nightly),
        pytest.param("grpo", {**GRPO, **zero(3)}, RANKS, "sdpa", marks=[pytest.mark.nightly, needs_deepspeed]),
        pytest.param("rloo", {**GRPO, **fsdp2(reshard_after_forward=False)}, RANKS, "sdpa", marks=pytest.mark.nightly),
        pytest.param("online_dpo", {"max_new_tokens": TOKENS, **fsdp2()}, RANKS, "sdpa", marks=pytest.mark.nightly),
    ],
    ids=["grpo-flash", "grpo-sdpa", "grpo-fsdp2", "grpo-zero3", "rloo-fsdp2-not-resharded", "online_dpo-fsdp2"],
)
def test_a_few_steps_need_the_memory_and_time_of_all(
    trainer: str, args: dict[str, Any], ranks: int, attention: str, job_server: JobServer, tmp_path: Path
) -> None:
    shape = {"per_device_train_batch_size": ROWS, "gradient_accumulation_steps": 1, "bf16": True}
    words = {"attn_implementation": attention}
    plan = TrainingPlan(trainer, {**shape, **args}, words, rewards=(NO_REWARD,), launch=Launch(ranks))
    model = ModelSource(str(write_small_model(tmp_path / "model", weights=False, **WIDE)))
    request = TraceRequest(plan, model, "cuda", worst=PROMPTS, gpu=find_gpu("A100-80GB"))
    # Engines change libraries for the rest of their process.
    (few, few_passes), (every, every_passes) = apart(job_server, trace_both_ways, request, tmp_path)

    assert (few_passes, every_passes) == (RUN, TOKENS)
    replays = [reply.replayed() for reply in (few, every)]
    assert replays[0].allocated_bytes == pytest.approx(replays[1].allocated_bytes, rel=0.001)
    assert replays[0].reserved_bytes == pytest.approx(replays[1].reserved_bytes, rel=0.005)
    for found, expected in zip(few.sections, every.sections, strict=True):
        assert max(found.totals) == pytest.approx(max(expected.totals), rel=0.001), found.part
        if found.time is not None and expected.time is not None:
            assert found.time.seconds == pytest.approx(expected.time.seconds, rel=0.03), found.part
            sent, all_sent = found.time.communication_seconds, expected.time.communication_seconds
            # Each generation sends a number once more, by which ranks tell one another whether they are done.
            assert sent == pytest.approx(all_sent, rel=0.001, abs=1e-8), found.part
