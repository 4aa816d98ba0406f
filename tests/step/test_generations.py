"""If a step has several generations, gradients are in memory during them, in probes and traces as in TRL's trainer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from trl import GRPOTrainer

from autotune.core.jobs.traced import TraceReply
from autotune.core.measurement import Schedule
from autotune.core.plan import Completions, Launch, TrainingPlan
from autotune.core.program import MICRO_BATCH
from autotune.core.timeline import Occurrence, Part
from autotune.planning.single import trace_request
from autotune.probing import JobServer, trace
from autotune.step.job import JobContext
from autotune.step.jobs.trace import trace as trace_job
from autotune.step.run.traced_training import traced_training
from autotune.step.run.virtual_trainer import TracedRows
from autotune.step.trainers import find_adapter
from autotune.step.trainers.prompts import Prompted as CompletesPrompts
from autotune.trainers import find_trainer
from autotune.trainers.groups import OLD_PASS
from autotune.trainers.prompts import GENERATION, NO_REWARD, Prompted
from autotune.virtual import trace as run_virtually
from tests.contract.building import built
from tests.small import long_tailed_texts, small_config, small_tokenizer, write_small_model
from tests.step.requests import trained
from tests.trainers.prepared import Prepared, prepared_rows
from tests.virtual.reference import run_on_cpu

SCHEDULE = Schedule(warmup_micro_batches=0, min_micro_batches=2, max_micro_batches=2, max_seconds=600.0)
TOKENS = 4
VOCABULARY = 16_384
GRPO = find_trainer("grpo")
# Micro-batches of a step, micro-batches of a generation batch, and iterations over it.
STEPS = (
    (4, 2, 1), (1, 1, 1), (1, 2, 2),
    *(
        pytest.param(step, marks=pytest.mark.nightly)
        for step in ((2, 2, 1), (3, 2, 1), (4, 1, 2), (2, 1, 1), (2, 4, 1), (1, 2, 1))
    ),
)  # fmt: skip


@pytest.fixture(scope="module")
def prompts(small_model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    rows = [{"prompt": text} for text in long_tailed_texts(32, longest_words=20)]
    return prepared_rows(GRPO, rows, small_model_directory, tmp_path_factory.mktemp("grpo"))


def args_of(step: tuple[int, int, int]) -> dict[str, Any]:
    names = ("gradient_accumulation_steps", "steps_per_generation", "num_iterations")
    sizes = {"per_device_train_batch_size": 2, "num_generations": 2, "max_completion_length": TOKENS}
    return {**sizes, **dict(zip(names, step, strict=True)), "beta": 0.0}


def plan_of(step: tuple[int, int, int]) -> TrainingPlan:
    args = {"use_cpu": True, "bf16": False, **args_of(step)}
    return TrainingPlan("grpo", args, rewards=(NO_REWARD,), completions=Completions(TOKENS, TOKENS))


@contextmanager
def noting_gradients() -> Iterator[list[bool]]:
    """Note for every generation of TRL's trainer whether gradients exist."""
    noted, generate = list[bool](), GRPOTrainer._generate_single_turn

    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        noted.append(any(weight.grad is not None for weight in self.model.parameters()))
        return generate(self, *args, **kwargs)

    with mock.patch.object(GRPOTrainer, "_generate_single_turn", noting):
        yield noted


@pytest.fixture(scope="module", params=STEPS, ids=str)
def step(request: pytest.FixtureRequest) -> tuple[int, int, int]:
    found: tuple[int, int, int] = request.param
    return found


@dataclass(frozen=True)
class OfTrl:
    """Whether generations find gradients, and old log-probabilities are computed, where TRL trains by itself."""

    finds_gradients: bool
    computes_old: bool


@pytest.fixture(scope="module")
def of_trl(step: tuple[int, int, int], prompts: Prepared, tmp_path_factory: pytest.TempPathFactory) -> OfTrl:
    old, folder = GRPOTrainer._get_per_token_logps_and_entropies, tmp_path_factory.mktemp("trl")
    watched = mock.patch.object(GRPOTrainer, "_get_per_token_logps_and_entropies", autospec=True, side_effect=old)
    with noting_gradients() as noted, watched as calls:
        built("grpo", prompts.model, folder, **{**args_of(step), "max_steps": 3}).train()
    return OfTrl(any(noted), any("batch_size" in call.kwargs for call in calls.call_args_list))


def traced(found: Prepared, plan: TrainingPlan, folder: Path) -> TraceReply:
    geometry = found.geometry(plan)
    request = trace_request(plan, geometry.layout, geometry.worst, 2, found.setting, None)
    return trace_job(request, JobContext(folder, time.monotonic()))


@pytest.fixture(scope="module")
def reply(step: tuple[int, int, int], prompts: Prepared, tmp_path_factory: pytest.TempPathFactory) -> TraceReply:
    return traced(prompts, plan_of(step), tmp_path_factory.mktemp("traced"))


def test_generations_of_probes_and_traces_find_gradients_where_those_of_trl_do(
    step: tuple[int, int, int], of_trl: OfTrl, reply: TraceReply, prompts: Prepared, tmp_path: Path
) -> None:
    with noting_gradients() as noted:
        trained(prompts.request(plan_of(step), SCHEDULE), tmp_path / "probe")

    assert any(noted) is of_trl.finds_gradients
    held = gradients(reply)
    assert any(held.values()) is of_trl.finds_gradients
    weights = 4 * prompts.reply.model.parameters
    assert held.get(Occurrence.FURTHER, 0) == (weights if of_trl.finds_gradients else 0)


def gradients(reply: TraceReply) -> Mapping[Occurrence, int]:
    """Return the most bytes of gradients that are held in generations, at the start of steps and within."""
    generations = [each for each in reply.sections if each.part.phase == GENERATION]
    return {each.part.occurrence: max(each.levels.get("gradient", (0,))) for each in generations}


def test_a_traced_micro_batch_finds_gradients_only_where_a_step_has_several(
    step: tuple[int, int, int], reply: TraceReply
) -> None:
    parts = {section.part for section in reply.sections}
    assert Part(MICRO_BATCH, Occurrence.FIRST) in parts
    assert (Part(MICRO_BATCH, Occurrence.FURTHER) in parts) is (step[0] > 1)


def test_vllm_generates_beside_gradients_too(prompts: Prepared, tmp_path: Path) -> None:
    plan = plan_of((4, 2, 1))
    reply = traced(prompts, replace(plan, args={**plan.args, "use_vllm": True}), tmp_path)
    assert gradients(reply) == {Occurrence.FIRST: 0, Occurrence.FURTHER: 4 * prompts.reply.model.parameters}


def test_traces_compute_old_log_probabilities_where_trl_does(of_trl: OfTrl, reply: TraceReply) -> None:
    assert (OLD_PASS in {section.part.phase for section in reply.sections}) is of_trl.computes_old


def test_a_step_has_as_many_generations_as_trl_s(step: tuple[int, int, int], prompts: Prepared) -> None:
    micro_batches, together, iterations = step
    plan = plan_of(step)
    (per_step,) = [phase.per_step for phase in prompts.geometry(plan).phases if phase.phase == GENERATION]
    led = micro_batches if GENERATION in GRPO.program(plan).leading else 1
    assert per_step * led == micro_batches / (together * iterations)


@pytest.mark.parametrize(
    ("trainer", "rows_each", "micro_batches", "copies"),
    [
        ("distillation", 16, 1, 1), ("online_dpo", 8, 1, 2), ("grpo", 1, 3, 3),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (("grpo", 16, 1, 2), ("rloo", 16, 1, 2), ("distillation", 1, 3, 1))
        ),
    ],
)  # fmt: skip
def test_a_traced_generation_needs_on_top_of_the_weights_what_that_of_trl_does(
    trainer: str, rows_each: int, micro_batches: int, copies: int, tmp_path: Path
) -> None:
    """The scores of a wide vocabulary are most of it. In TRL's training, random completions do not end this early."""
    known, adapter = find_trainer(trainer), find_adapter(trainer)
    assert isinstance(known, Prompted)
    assert isinstance(adapter, CompletesPrompts)
    model = write_small_model(tmp_path / "model", vocab_size=VOCABULARY)
    config = small_config(vocab_size=VOCABULARY)
    rows: list[Any] = [{"prompt": "memory" + " memory" * 11}] * 16
    method = adapter.methods[GENERATION]
    sizes = {"per_device_train_batch_size": rows_each, known.max_completion_field: TOKENS}
    args: dict[str, Any] = {**sizes, "gradient_accumulation_steps": micro_batches, "gradient_checkpointing": False}
    args |= {"num_generations": copies} if "num_generations" in known.fields else {}
    args |= {"max_length": 64} if trainer == "online_dpo" else {}
    generate = getattr(adapter.trainer, method)

    def generating(self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function(GENERATION):
            return generate(self, *args, **kwargs)

    def train(_: torch.device) -> None:
        with mock.patch.object(adapter.trainer, method, generating):
            built(trainer, model, tmp_path / "trl", rows=rows, max_steps=1, **args).train()

    real = run_on_cpu(train, phases=GENERATION)[GENERATION]

    found = prepared_rows(known, rows, model, tmp_path / "rows")
    plan = known.completed(TrainingPlan(trainer, {"use_cpu": True, "bf16": False, **args}), found.workload)
    geometry = found.geometry(plan)
    (shape,) = [phase.worst for phase in geometry.phases if phase.phase == GENERATION]
    made = TracedRows(known.traced_rows(geometry.layout, shape, 1.0))
    steps = traced_training(known.traced_plan(plan, geometry.layout, shape), config, small_tokenizer(), made)
    phase = next(each for each in run_virtually(steps, target="cpu").phases if each.name == GENERATION)

    needed = real.peak_bytes - real.start_bytes
    assert needed > 3 * 4 * VOCABULARY * rows_each * adapter.completions_per_row * micro_batches
    assert phase.device_peak.bytes - phase.start_bytes == pytest.approx(needed, rel=0.02)


@pytest.mark.nightly
@pytest.mark.parametrize(("micro_batches", "finds"), [(2, False), (4, True)])
def test_generations_of_traces_with_two_processes_find_gradients_too(
    micro_batches: int, finds: bool, prompts: Prepared, job_server: JobServer, tmp_path: Path
) -> None:
    plan = replace(plan_of((micro_batches, 2, 1)), launch=Launch(2))
    geometry = prompts.geometry(plan)
    request = trace_request(plan, geometry.layout, geometry.worst, 2, prompts.setting, None)
    sections = trace(job_server, replace(request, target="cuda"), tmp_path / "trace").sections
    # DDP's buckets hold gradients all the time, and the weights' own gradients are views of them.
    further = [each for each in sections if each.part == Part(GENERATION, Occurrence.FURTHER)]
    assert bool(further) is finds
