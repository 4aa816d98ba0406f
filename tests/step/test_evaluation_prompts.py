"""Evaluation of trainers that generate: completions of the widest prompts to evaluate on, in whole groups."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.core.batch_geometry import Shape
from autotune.core.measurement import Measurement
from autotune.core.plan import TrainingPlan
from autotune.core.program import EVALUATE
from autotune.core.protocol import PrepareRequest, ProbeRequest
from autotune.core.setting import Setting
from autotune.core.status import ProbeStatus
from autotune.core.workload import DatasetSource, ModelSource, Workload
from autotune.space import Wishes
from autotune.step.job import JobContext
from autotune.step.jobs.prepare import prepare
from autotune.step.jobs.probe import probe
from autotune.step.run.meters import METERS
from autotune.step.run.progress import Progress
from autotune.step.run.training import build_trainer
from autotune.step.trainers import adapter
from autotune.trainers import find_trainer
from autotune.trainers.evaluation import whole_geometry
from tests.settings import CPU, problem, separates
from tests.small import write_rows
from tests.step.requests import BRIEF

TRAINED, EVALUATED = [4, 9, 6, 12, 7, 5, 10, 8], [5, 40, 7]
"""Words of prompts."""
SIZES = {"max_completion_length": 8, "num_generations": 2, "per_device_train_batch_size": 2}
GENERATING = pytest.mark.parametrize("trainer", ["grpo", "rloo"])


def workload_of(trainer: str, model: Path, folder: Path) -> Workload:
    """Prepare prompts to train on and longer ones to evaluate on."""
    words = {"a": TRAINED, "b": EVALUATED}
    files = [
        write_rows(folder / f"{name}.jsonl", ({"prompt": " ".join(["memory"] * count)} for count in counts))
        for name, counts in words.items()
    ]
    sources = [DatasetSource(file.name, "json", str(file)) for file in files]
    where = [str(folder / name) for name in ("tokenized", "evaluation")]
    source = ModelSource(str(model))
    request = PrepareRequest(source, sources[0], trainer, where[0], sources[1], where[1])
    reply = prepare(request, JobContext(folder, time.monotonic()))
    checks = {"sdpa": separates("sdpa")}
    return Workload(trainer, source, sources[0], reply.model, reply.dataset, checks, sources[1], reply.evaluation)


def request_of(workload: Workload, **choices: int) -> ProbeRequest:
    allowed = frozenset(choices) | frozenset(SIZES)
    of = problem(Setting(workload, CPU, 4, 1.0, allowed), Wishes({}), workload.trainer)
    candidate = of.trainer.normal(of.baseline.but(**{**SIZES, **choices}), of.setting)
    assert of.trainer.illegal(candidate, of.setting) is None
    plan = of.trainer.plan(candidate, of.setting)
    assert workload.evaluation is not None
    rows, evaluated = workload.dataset.tokenized_directory, workload.evaluation.tokenized_directory
    return ProbeRequest(plan, workload.model_source, "cpu", rows, BRIEF, evaluation_directory=evaluated)


def probed(request: ProbeRequest, folder: Path) -> Measurement:
    folder.mkdir()
    (shown,) = probe(request, JobContext(folder, time.monotonic())).ranks
    assert (shown.status, shown.reason) == (ProbeStatus.OK, "")
    return shown


def built(request: ProbeRequest, folder: Path) -> Any:
    from datasets import load_from_disk

    rows = load_from_disk(request.tokenized_directory)
    return build_trainer(request, rows, folder, Progress(request.schedule, METERS["cpu"]()))


@GENERATING
def test_the_widest_prompts_are_completed_in_an_evaluation_of_the_size_that_is_planned(
    trainer: str, small_model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = workload_of(trainer, small_model_directory, tmp_path)
    request = request_of(workload, per_device_eval_batch_size=4)
    trained: list[int] = []
    evaluated: list[tuple[int, int]] = []
    whole = adapter(trainer).trainer.compute_loss

    def compute_loss(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        widths = [inputs[name].shape[1] for name in ("prompt_ids", "completion_ids")]
        if self.model.training:
            trained.append(sum(widths))
        else:
            evaluated.append((len(inputs["prompt_ids"]), sum(widths)))
        return whole(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(adapter(trainer).trainer, "compute_loss", compute_loss)
    shown = probed(request, tmp_path / "probe")
    assert EVALUATE in shown.peaks
    assert shown.evaluation_seconds is not None
    geometry = whole_geometry(find_trainer(trainer), request.plan, workload).evaluation
    assert geometry is not None
    # The longest completions of the widest prompts come first.
    assert Shape(*evaluated[0], SIZES["max_completion_length"]) == geometry.worst
    assert geometry.worst.tokens == max(tokens for _, tokens in evaluated) > max(trained)


@GENERATING
def test_no_evaluation_of_trl_s_loader_is_larger(trainer: str, small_model_directory: Path, tmp_path: Path) -> None:
    workload = workload_of(trainer, small_model_directory, tmp_path)
    for rows, at_most in ((2, 2), (4, 4), (16, 6)):
        request = request_of(workload, per_device_eval_batch_size=rows)
        real = built(request, tmp_path / str(rows))
        # As TRL draws them: in random order, each prompt as often as it is completed.
        real.args.train_sampling_strategy = "random"
        batches = list(real.get_eval_dataloader())
        geometry = whole_geometry(find_trainer(trainer), request.plan, workload).evaluation
        assert geometry is not None
        assert geometry.worst.rows == at_most == max(map(len, batches))
        drawn = max(len(row["prompt_ids"]) for batch in batches for row in batch)
        assert geometry.worst.tokens == drawn + SIZES["max_completion_length"]


@GENERATING
@pytest.mark.parametrize(("copies", "rows", "at_most"), [(1, 1, 1), (1, 3, 3), (4, 4, 4), (4, 16, 12)])
def test_prompts_to_evaluate_on_are_completed_as_often_as_their_own_number_says(
    trainer: str, copies: int, rows: int, at_most: int, small_model_directory: Path, tmp_path: Path
) -> None:
    workload = workload_of(trainer, small_model_directory, tmp_path)
    request = request_of(workload, per_device_eval_batch_size=4)
    own = {"num_generations_eval": copies, "per_device_eval_batch_size": rows}
    request = replace(request, plan=replace(request.plan, args={**request.plan.args, **own}))
    real = built(request, tmp_path / "built")
    real.args.train_sampling_strategy = "random"
    batches = list(real.get_eval_dataloader())
    geometry = whole_geometry(find_trainer(trainer), request.plan, workload).evaluation
    assert geometry is not None
    assert geometry.worst.rows == at_most == max(map(len, batches))


def test_a_probe_evaluates_with_as_many_completions_as_the_plan_says(
    small_model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = workload_of("grpo", small_model_directory, tmp_path)
    request = request_of(workload, per_device_eval_batch_size=4)
    own = {"num_generations_eval": 1, "per_device_eval_batch_size": 3}
    request = replace(request, plan=replace(request.plan, args={**request.plan.args, **own}))
    evaluated: list[int] = []
    whole = adapter("grpo").trainer.compute_loss

    def compute_loss(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.model.training:
            evaluated.append(len(inputs["prompt_ids"]))
        return whole(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(adapter("grpo").trainer, "compute_loss", compute_loss)
    assert EVALUATE in probed(request, tmp_path / "probe").peaks
    assert set(evaluated) == {len(EVALUATED)}


@GENERATING
@pytest.mark.parametrize("rows", [3, 4])
def test_evaluated_completions_form_whole_groups_as_trl_demands(
    trainer: str, rows: int, small_model_directory: Path, tmp_path: Path
) -> None:
    workload = workload_of(trainer, small_model_directory, tmp_path)
    allowed = frozenset(SIZES)
    of = problem(Setting(workload, CPU, 4, 1.0, allowed), Wishes({}), trainer)
    candidate = of.trainer.normal(of.baseline.but(**SIZES, per_device_eval_batch_size=rows), of.setting)
    args = of.trainer.plan(candidate, of.setting).args

    def configure() -> None:
        adapter(trainer).config(**{**args, "output_dir": str(tmp_path), "bf16": False, "model_init_kwargs": None})

    if rows == 4:
        assert of.trainer.illegal(candidate, of.setting) is None
        configure()
        return
    assert of.trainer.illegal(candidate, of.setting) == (
        "an evaluation batch of 3 completions (per_device_eval_batch_size) cannot be divided into groups of the 2 "
        "completions of one prompt (num_generations)"
    )
    with pytest.raises(ValueError, match="must be divisible by the number of generations used for evaluation"):
        configure()


def test_the_size_is_searched_where_there_are_prompts_to_evaluate_on(
    small_model_directory: Path, tmp_path: Path
) -> None:
    workload = workload_of("grpo", small_model_directory, tmp_path)
    for of, sizes in ((workload, {4, 8, 16, 32, 64}), (replace(workload, evaluation=None), {8})):
        found = problem(Setting(of, CPU, 8, 1.0), Wishes({}), "grpo")
        assert set(found.choices.get("per_device_eval_batch_size", (8,))) == sizes


def test_trl_s_online_dpo_cannot_be_evaluated(small_model_directory: Path, tmp_path: Path) -> None:
    workload = workload_of("online_dpo", small_model_directory, tmp_path)
    of = problem(Setting(workload, CPU, 8, 1.0), Wishes({}), "online_dpo")
    plan: TrainingPlan = of.trainer.plan(of.baseline, of.setting)
    evaluation = workload.evaluation
    assert evaluation is not None
    request = ProbeRequest(
        plan, workload.model_source, "cpu", workload.dataset.tokenized_directory, BRIEF,
        evaluation_directory=evaluation.tokenized_directory,
    )  # fmt: skip
    real = built(request, tmp_path / "built")
    # It gives the columns of the dataset to the model.
    with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
        real.evaluate(real.eval_dataset.select_columns(["prompt"]))
