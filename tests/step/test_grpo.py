"""Probes of GRPO and RLOO: what a generation batch is, when passes run, and what few micro-batches stand for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trl import GRPOTrainer

from autotune.core.documents import Documents
from autotune.core.lengths import LengthDistribution
from autotune.core.measurement import Schedule
from autotune.core.plan import Completions, TrainingPlan
from autotune.core.protocol import PrepareReply, PrepareRequest, ProbeRequest
from autotune.core.status import ProbeStatus
from autotune.core.workload import DatasetSource, ModelSource, Rollouts
from autotune.errors import InputError
from autotune.probing import JobServer, prepare, probe
from autotune.step.run.meters import CpuMeter
from autotune.step.run.progress import Progress
from autotune.step.run.traced_training import traced_training
from autotune.step.run.training import train
from autotune.step.run.virtual_trainer import TracedRows
from autotune.step.trainers.prompts import WANTED, reward_function
from autotune.trainers import find_trainer
from autotune.trainers.groups import OLD_PASS
from autotune.trainers.prompts import REFERENCE_PASS
from autotune.virtual import trace
from tests.small import long_tailed_texts, small_tokenizer, write_rows
from tests.virtual.models import config_of

SCHEDULE = Schedule(warmup_micro_batches=0, min_micro_batches=4, max_micro_batches=4, max_seconds=600.0)
TEXTS = long_tailed_texts(64, longest_words=40)
MOST = 10


@pytest.fixture(scope="module")
def prompts(
    job_server: JobServer, small_model_directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> PrepareReply:
    return prepared(job_server, small_model_directory, tmp_path_factory.mktemp("grpo"), Rollouts())


def prepared(server: JobServer, model: Path, folder: Path, rollouts: Rollouts) -> PrepareReply:
    file = write_rows(
        folder / "prompts.jsonl", [{"prompt": text, "answer": text[: i % 30]} for i, text in enumerate(TEXTS)]
    )
    source = DatasetSource(file.name, "json", str(file))
    request = PrepareRequest(
        ModelSource(str(model)), source, "grpo", str(folder / "tokenized"), rollouts=rollouts
    )  # fmt: skip
    return prepare(server, request, folder / "prepare")


def request_of(workload: PrepareReply, trainer: str = "grpo", **args: object) -> ProbeRequest:
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_completion_length": MOST}
    fixed = {"use_cpu": True, "bf16": False, "num_generations": 2}
    plan = TrainingPlan(
        trainer,
        {**fixed, **sizes, **args},
        rewards=("get_soft_overlong_punishment",),
        completions=Completions(mean=4.0, widest=4.0),
    )
    source, rows = ModelSource(workload.model.name), workload.dataset.tokenized_directory
    return ProbeRequest(plan, source, "cpu", rows, SCHEDULE)


def trained(request: ProbeRequest, folder: Path) -> tuple[Progress, Any]:
    progress = Progress(request.schedule, CpuMeter())
    return progress, train(request, folder, progress)


@pytest.mark.parametrize(
    ("trainer", "args", "passes"),
    [
        ("grpo", {}, set()),
        ("grpo", {"steps_per_generation": 2}, set()),
        ("grpo", {"num_iterations": 2}, {"old log-probabilities"}),
        ("grpo", {"beta": 0.1}, {"reference log-probabilities"}),
        ("rloo", {"beta": 0.05}, {"old log-probabilities", "reference log-probabilities"}),
        ("rloo", {"beta": 0.0}, {"old log-probabilities"}),
    ],
)
def test_the_passes_over_a_generation_batch_are_those_of_a_whole_step(
    trainer: str, args: dict[str, object], passes: set[str], prompts: PrepareReply, tmp_path: Path
) -> None:
    # Only two of the four micro-batches of a step are run, which TRL must not notice.
    progress, _ = trained(request_of(prompts, trainer, **args), tmp_path)
    assert progress.peaks.keys() & {"old log-probabilities", "reference log-probabilities"} == passes
    assert all(
        generation.phases.keys() == {"generation", "scoring", *passes} for generation in progress.timed.generations
    )


@pytest.mark.parametrize("micro_batches", [2, 16])
def test_a_probe_generates_whole_generation_batches_and_runs_few_micro_batches_on_each(
    micro_batches: int, prompts: PrepareReply, tmp_path: Path
) -> None:
    request = request_of(prompts, "rloo", beta=0.05, gradient_accumulation_steps=micro_batches)
    progress, trainer = trained(request, tmp_path)
    batches, whole = progress.batches, progress.whole_step
    assert batches is not None
    assert whole is not None
    assert batches.step_micro_batches == 2
    # The data loader yields all rows of a generation batch, each prompt twice in succession.
    assert batches.order.shape[1] == 2 * micro_batches
    assert (batches.order[:, ::2] == batches.order[:, 1::2]).all()
    assert whole.generations == 1.0
    share = min(1.0, 2 / micro_batches)
    assert set(whole.run_share.values()) == {share}
    assert len(progress.timed.generations) == len(progress.timed.micro_batches) / 2
    assert trainer.args.gradient_accumulation_steps == 2


def test_a_generation_whose_parts_were_run_in_part_counts_as_whole(prompts: PrepareReply, tmp_path: Path) -> None:
    progress, _ = trained(request_of(prompts, "rloo", beta=0.05, gradient_accumulation_steps=8), tmp_path)
    whole, generation = progress.whole_step, progress.timed.generations[0]
    assert whole is not None
    passes = sum(seconds for name, seconds in generation.phases.items() if "log-probabilities" in name)
    assert whole.whole(generation) == pytest.approx(generation.seconds + 3 * passes)


def test_worst_completions_are_as_long_as_they_may_be_and_each_micro_batch_has_a_mask(
    prompts: PrepareReply, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int, bool]] = []
    compute = GRPOTrainer.compute_loss

    def watched(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        mask = inputs["completion_mask"]
        seen.append((*mask.shape, bool(mask.all())))
        return compute(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(GRPOTrainer, "compute_loss", watched)
    trained(request_of(prompts, "grpo"), tmp_path)
    worst, typical = seen[:4], seen[-4:]
    assert {shape[:2] for shape in worst} == {(2, MOST)}
    assert not any(full for *_, full in worst)
    assert {shape[1] for shape in typical} == {4}


def test_typical_completions_are_as_long_as_a_column_says(
    job_server: JobServer, small_model_directory: Path, tmp_path: Path
) -> None:
    workload = prepared(job_server, small_model_directory, tmp_path, Rollouts(column="answer"))
    lengths = workload.dataset.completions
    assert lengths is not None
    assert lengths.rows == len(TEXTS)
    progress, trainer = trained(request_of(workload), tmp_path)
    assert progress.batches is not None
    is_worst = np.repeat(progress.batches.is_worst, progress.batches.order.shape[1])
    wanted = np.array(trainer.train_dataset[WANTED])[:, 0]
    assert 1 <= wanted[~is_worst].min() < wanted[~is_worst].mean() < wanted[~is_worst].max() <= MOST
    assert wanted[is_worst].min() == MOST - 1


def test_a_probe_out_of_memory_names_the_generation(
    job_server: JobServer, prompts: PrepareReply, tmp_path: Path
) -> None:
    request = request_of(
        prompts, per_device_train_batch_size=1, gradient_accumulation_steps=128, max_completion_length=400
    )
    # Generating all completions at once needs 58 MiB, training on one of them at a time 23 MiB.
    request = replace(request, limit_bytes=24 * 2**20)
    ended = probe(job_server, request, tmp_path / "probe", timeout_seconds=240)
    assert ended.status is ProbeStatus.OUT_OF_MEMORY
    assert ended.out_of_memory is not None
    assert ended.out_of_memory.phase == "generation"


def test_a_reward_function_that_is_not_there_is_told_by_name() -> None:
    assert reward_function("think_format_reward").__name__ == "think_format_reward"
    with pytest.raises(InputError, match="There is no reward function 'sorting'"):
        reward_function("sorting")
    with pytest.raises(InputError, match="json has no function sorting"):
        reward_function("json.sorting")


@pytest.mark.parametrize("once", [True, False])
def test_a_traced_pass_over_a_generation_batch_runs_one_of_the_chunks_that_the_geometry_counts(once: bool) -> None:
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_completion_length": MOST}
    args = {**sizes, "bf16": False, "num_generations": 2, "beta": 0.05}
    assumed = Completions(mean=4.0, widest=4.0)
    plan = TrainingPlan("rloo", args, rewards=("get_soft_overlong_punishment",), completions=assumed)
    known = find_trainer("rloo")
    geometry = known.geometry(plan, Documents.of_lengths(LengthDistribution({20: 8})))
    assert {phase.phase: phase.per_step for phase in geometry.apart}[OLD_PASS] == 4
    traced_plan = known.traced_plan(plan, geometry.layout, geometry.worst)
    rows = TracedRows(known.traced_rows(geometry.layout, geometry.worst, 1.0), once=once)
    run = traced_training(traced_plan, config_of("llama", num_hidden_layers=1), small_tokenizer(), rows)
    traced = trace(run, target="cuda", capability=(8, 0))
    for name in (OLD_PASS, REFERENCE_PASS):
        phase = next(phase for phase in traced.phases if phase.name == name)
        ran = traced.operators[phase.first_operator : phase.end_operator]
        assert sum("embedding" in operator.name for operator in ran) == 1
