"""Generations of completions within an optimizer step find gradients in probes and traces, as in TRL's own trainer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from trl import GRPOTrainer

from autotune.core.measurement import Schedule
from autotune.core.plan import Completions, Launch, TrainingPlan
from autotune.core.timeline import Occurrence, Part
from autotune.core.traced import TraceReply
from autotune.planning.single import trace_request
from autotune.probing import JobServer, trace
from autotune.step.job import JobContext
from autotune.step.jobs.trace import trace as trace_job
from autotune.trainers import find_trainer
from autotune.trainers.groups import OLD_PASS
from autotune.trainers.prompts import GENERATION, NO_REWARD
from tests.contract.building import built
from tests.small import long_tailed_texts
from tests.step.requests import trained
from tests.trainers.prepared import Prepared, prepared_rows

SCHEDULE = Schedule(warmup_micro_batches=0, min_micro_batches=2, max_micro_batches=2, max_seconds=600.0)
TOKENS = 4
GRPO = find_trainer("grpo")
# Micro-batches of a step, micro-batches of a generation batch, and iterations over it.
STEPS = ((2, 2, 1), (4, 2, 1), (3, 2, 1), (2, 1, 1), (2, 4, 1), (1, 2, 2), (4, 1, 2))


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


def find_gradients(step: tuple[int, int, int], model: Path, folder: Path) -> bool:
    """Return whether some generation finds gradients where TRL trains whole steps by itself."""
    with noting_gradients() as noted:
        built("grpo", model, folder, **{**args_of(step), "max_steps": 3}).train()
    return any(noted)


def traced(found: Prepared, plan: TrainingPlan, folder: Path) -> TraceReply:
    geometry = found.geometry(plan)
    request = trace_request(plan, geometry.layout, geometry.worst, 2, found.setting, None)
    return trace_job(request, JobContext(folder, time.monotonic()))


@pytest.mark.parametrize("step", STEPS)
def test_generations_of_probes_and_traces_find_gradients_where_those_of_trl_do(
    step: tuple[int, int, int], prompts: Prepared, tmp_path: Path
) -> None:
    expected, plan = find_gradients(step, prompts.model, tmp_path / "trl"), plan_of(step)

    with noting_gradients() as noted:
        trained(prompts.request(plan, SCHEDULE), tmp_path / "probe")
    reply = traced(prompts, plan, tmp_path)

    assert any(noted) is expected
    held = {
        section.part.occurrence: max(section.levels.get("gradient", (0,)))
        for section in reply.sections
        if section.part.phase == GENERATION
    }
    assert any(held.values()) is expected
    weights = 4 * prompts.reply.model.parameters
    assert held.get(Occurrence.FURTHER, 0) == (weights if expected else 0)


@pytest.mark.parametrize("step", STEPS)
def test_traces_compute_old_log_probabilities_where_trl_does(
    step: tuple[int, int, int], prompts: Prepared, tmp_path: Path
) -> None:
    old = GRPOTrainer._get_per_token_logps_and_entropies
    with mock.patch.object(GRPOTrainer, "_get_per_token_logps_and_entropies", autospec=True, side_effect=old) as calls:
        built("grpo", prompts.model, tmp_path / "trl", **{**args_of(step), "max_steps": 3}).train()
    expected = any("batch_size" in call.kwargs for call in calls.call_args_list)

    phases = {section.part.phase for section in traced(prompts, plan_of(step), tmp_path).sections}

    assert (OLD_PASS in phases) is expected


@pytest.mark.parametrize("step", STEPS)
def test_a_step_has_as_many_generations_as_trl_s(step: tuple[int, int, int], prompts: Prepared) -> None:
    micro_batches, together, iterations = step
    plan = plan_of(step)
    (per_step,) = [phase.per_step for phase in prompts.geometry(plan).apart if phase.phase == GENERATION]
    led = micro_batches if GENERATION in GRPO.program(plan).leading else 1
    assert per_step * led == micro_batches / (together * iterations)


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
