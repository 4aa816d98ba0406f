"""Exact choices train the same: their gradients and new weights equal those of TRL's own trainer.

One optimizer step has all documents, in float32, so that neither their order nor rounding makes a difference.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM, TrainerCallback

from autotune.core.candidate import Candidate
from autotune.core.jobs.protocol import CheckPackingRequest
from autotune.core.setting import Setting
from autotune.core.workload import ModelSource
from autotune.step.job import JobContext
from autotune.step.jobs.check_packing import check_packing
from autotune.trainers import trainers
from autotune.trainers.base import Trainer
from autotune.trainers.problem import TrainerProblem
from autotune.trainers.prompts import Prompted
from tests.contract.building import built
from tests.settings import CPU, problem
from tests.small import write_small_model
from tests.trainers.prepared import LIKE_GRPO, Prepared, prepared_rows, richest
from tests.trainers.samples import sample_rows
from tests.virtual.models import ARCHITECTURES, FURTHER

DOCUMENTS = 8
COMBINED = 4
ROUNDING = 5e-5
"""Share by which gradients may differ; those of the heads of reward models come to 1e-5."""
FAMILIES = ("gemma3_text", "mistral", "opt", "mixtral", "gpt_neox", "qwen3_moe")
WITHOUT_DROPOUT = {"opt": {"dropout": 0.0}}
Tensors = Mapping[str, torch.Tensor]


class Step(TrainerCallback):
    """Keeps the gradient of the last optimizer step."""

    def on_pre_optimizer_step(self, *_: object, model: Any, **__: object) -> None:
        self.gradient = {name: weight.grad.clone() for name, weight in trainable(model).items()}


def trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the weights that are trained, by their plain names."""
    return {plain(name): weight for name, weight in model.named_parameters() if weight.requires_grad}


def plain(name: str) -> str:
    """Return the name of a weight without the module around a checkpointed layer."""
    return name.replace("_checkpoint_wrapped_module.", "")


def trained(found: Prepared, here: TrainerProblem, candidate: Candidate, folder: Path) -> tuple[Tensors, Tensors]:
    """Return the gradient and the weights after one step of TRL's trainer on the rows as the user has them."""
    trainer, plan = found.trainer, here.trainer.plan(candidate, here.setting)
    shortest: dict[str, object] = {trainer.max_completion_field: 8} if isinstance(trainer, Prompted) else {}
    rows = [json.loads(line) for line in Path(found.asked.dataset.places[0]).read_text(encoding="utf-8").splitlines()]
    fixed = {
        "max_steps": 1,
        "max_grad_norm": 0.0,
        "learning_rate": 1e-3,
        "logging_strategy": "no",
        "save_strategy": "no",
    }
    known = built(
        trainer.name,
        found.model,
        folder,
        rows=rows,
        words={**plan.model, "lora_dropout": 0.0},
        teacher=another(found.model),
        **{**plan.args, **shortest, **fixed},
    )
    if not trainer.generates:
        # Packed rows are fewer than the documents.
        known.args.gradient_accumulation_steps = -(-len(known.train_dataset) // plan.rows)
    # An adapter that is new adds nothing.
    drawn = torch.Generator().manual_seed(1)
    for name, weight in trainable(known.model).items():
        if "lora_" in name:
            weight.data.normal_(0, 0.05, generator=drawn)
    step = Step()
    known.add_callback(step)
    with mock.patch.object(torch, "multinomial", likely):
        known.train()
    return step.gradient, {name: weight.detach() for name, weight in trainable(known.model).items()}


def likely(probabilities: torch.Tensor, num_samples: int = 1, **_: object) -> torch.Tensor:
    """Return tokens that do not depend on what was generated before: the likeliest, or in some rows the next.

    Completions of one prompt differ: its copies are neighbours, or all prompts come twice.
    """
    found = probabilities.topk(2).indices
    rows, half = torch.arange(len(found)), len(found) // 2
    second_time = rows // half if half % 2 == 0 else 0
    return found[rows, (rows + second_time) % 2].unsqueeze(-1)


def another(model: Path) -> Path:
    """Return a model of the same shape with other weights."""
    folder = model.parent / "another"
    if not folder.exists():
        loaded = AutoModelForCausalLM.from_pretrained(model)
        with torch.no_grad():
            for weight in loaded.parameters():
                weight.mul_(2)
        loaded.save_pretrained(folder)
    return folder


def difference(one: Tensors, other: Tensors) -> float:
    """Return by which share of their norm tensors differ."""
    assert one.keys() == other.keys()
    apart = sum(float((one[name] - other[name]).square().sum()) for name in one)
    return float((apart / sum(float(tensor.square().sum()) for tensor in one.values())) ** 0.5)


def eight_rows(
    trainer: Trainer, model: Path, folder: Path, allowed: frozenset[str] = frozenset()
) -> tuple[Prepared, TrainerProblem]:
    """Return rows of the trainer's richest format, and the space in which what changes training is not allowed."""
    rows = sample_rows(trainer.name, richest(trainer))[:DOCUMENTS]
    found = prepared_rows(trainer, rows, model, folder)
    tested = CheckPackingRequest(trainer.name, ModelSource(str(model)), "cpu", ("sdpa", "eager"))
    checks = check_packing(tested, JobContext(folder, time.monotonic()))
    workload = replace(found.workload, packing_checks={check.attention: check for check in checks})
    depends = trainer.loss_depends_on({}, workload.model)
    documents = workload.dataset.documents.rows
    setting = Setting(workload, CPU, documents, 1.0, allowed=allowed, loss_depends_on=depends)
    return found, problem(setting, trainer=trainer.name)


def exact_candidates(here: TrainerProblem, lora: str) -> Iterator[Candidate]:
    """Yield the baseline in float32, all legal candidates one choice from it, and some that differ in many."""
    held = {"precision": "float32", "lora": lora}
    start, drawn = here.normal(here.baseline.but(**held)), random.Random(1)
    others = {name: choices for name, choices in here.choices.items() if name not in held}
    single = [start.but(**{name: choice}) for name, choices in others.items() for choice in choices]
    legal = (here.normal(one) for one in single)
    yield from dict.fromkeys([start, *(one for one in legal if not here.illegal(one))])
    count = 0
    while count < COMBINED:
        one = here.normal(start.but(**{name: drawn.choice(choices) for name, choices in others.items()}))
        if not here.illegal(one):
            count += 1
            yield one


def unlike_the_baseline(found: Prepared, here: TrainerProblem, folder: Path, lora: str = "none") -> Iterator[str]:
    """Yield each candidate whose step is another one than the baseline's."""
    start, *others = exact_candidates(here, lora)
    gradient, weights = trained(found, here, start, folder)
    assert others
    for candidate in others:
        differs = candidate.differences(start)
        other_gradient, other_weights = trained(found, here, candidate, folder)
        apart = difference(gradient, other_gradient)
        if apart > ROUNDING:
            yield f"{differs}: the gradient differs by {apart:.1e}"
        apart = difference(weights, other_weights)
        if apart > ROUNDING:
            yield f"{differs}: the weights differ by {apart:.1e}"


@pytest.mark.parametrize(
    "trainer",
    [
        pytest.param(each, id=name, marks=pytest.mark.nightly if name in LIKE_GRPO else ())
        for name, each in trainers().items()
    ],
)
def test_exact_choices_have_the_gradient_of_trl_s_default(
    trainer: Trainer, small_model_directory: Path, tmp_path: Path
) -> None:
    found, here = eight_rows(trainer, small_model_directory, tmp_path / "rows")
    assert list(unlike_the_baseline(found, here, tmp_path)) == []


@pytest.mark.nightly
@pytest.mark.parametrize("lora", ["r16", "r16-attention"])
@pytest.mark.parametrize("trainer", trainers().values(), ids=lambda item: item.name)
def test_exact_choices_have_it_with_adapters(
    trainer: Trainer, lora: str, small_model_directory: Path, tmp_path: Path
) -> None:
    found, here = eight_rows(trainer, small_model_directory, tmp_path / "rows", frozenset({"lora"}))
    assert list(unlike_the_baseline(found, here, tmp_path, lora)) == []


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("trainer", [one for one in trainers().values() if not one.generates], ids=lambda one: one.name)
def test_exact_choices_have_it_with_other_architectures(trainer: Trainer, family: str, tmp_path: Path) -> None:
    shape = {**ARCHITECTURES, **FURTHER}[family] | WITHOUT_DROPOUT.get(family, {})
    model = write_small_model(tmp_path / "model", family, **shape)
    found, here = eight_rows(trainer, model, tmp_path / "rows")
    assert list(unlike_the_baseline(found, here, tmp_path)) == []


def test_micro_batches_of_another_size_are_exact_with_none_of_the_trainers_whose_loss_depends_on_them(
    small_model_directory: Path, tmp_path: Path
) -> None:
    found, here = eight_rows(trainers()["online_dpo"], small_model_directory, tmp_path / "rows")
    start = here.normal(here.baseline.but(precision="float32"))
    halved = here.normal(start.but(per_device_train_batch_size=4))

    assert here.illegal(halved)
    gradients = [trained(found, here, one, tmp_path)[0] for one in (start, halved)]
    assert difference(*gradients) > 0.5
