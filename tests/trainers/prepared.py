"""Helpers of the conformance suite: sample rows, plans, and TRL's trainer, for every trainer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from datasets import Dataset, load_from_disk

from autotune.core.candidate import Candidate, Choice
from autotune.core.jobs.protocol import PrepareRequest, ProbeRequest
from autotune.core.measurement import Schedule
from autotune.core.plan import TrainingPlan
from autotune.core.rows.batch_geometry import BatchGeometry
from autotune.core.setting import GLOBAL_BATCH, Setting
from autotune.core.workload import DatasetSource, ModelSource, Rollouts, Workload
from autotune.step.job import JobContext
from autotune.step.jobs.prepare import prepare
from autotune.step.run.meters import METERS
from autotune.step.run.progress import Progress
from autotune.step.run.training import build_trainer
from autotune.step.trainers import Adapter, find_adapter
from autotune.trainers.base import Trainer
from tests.settings import CPU, problem, separates
from tests.small import write_rows
from tests.trainers.samples import REFUSED, Rows, sample_rows

DOCUMENTS_PER_STEP = 24
Prepare = Callable[[Trainer, str], "Prepared"]
LIKE_GRPO = ("rloo", "online_dpo", "distillation")
"""Trainers that take prompts and generate, as GRPO does: their slow tests are left to the nightly run."""
WHOLE_STEPS = Schedule(whole_steps=True, warmup_micro_batches=0, min_micro_batches=2, max_micro_batches=2)


def richest(trainer: Trainer) -> str:
    """Return the format with the most columns: in its rows, prompts and answers can be cut or dropped apart."""
    return max(trainer.formats, key=lambda form: len(form.columns)).name


def refused_by_trl(trainer: Trainer, choices: Mapping[str, Choice]) -> bool:
    """Whether TRL refuses choices with a trainer."""
    return trainer.name in REFUSED and REFUSED[trainer.name](choices)


@dataclass(frozen=True)
class Prepared:
    """A trainer, and rows that its ``prepare`` job has tokenised."""

    trainer: Trainer
    asked: PrepareRequest
    reply: Workload

    @property
    def model(self) -> Path:
        """The folder of the model."""
        return Path(self.asked.model.name)

    @property
    def adapter(self) -> Adapter:
        """The child's side of the trainer."""
        return find_adapter(self.trainer.name)

    @cached_property
    def rows(self) -> Dataset:
        """The tokenised rows."""
        return load_from_disk(self.reply.dataset.tokenized_directory)

    @cached_property
    def workload(self) -> Workload:
        """What was read."""
        return Workload(
            self.trainer.name,
            self.asked.model,
            self.asked.dataset,
            self.reply.model,
            self.reply.dataset,
            {"sdpa": separates("sdpa")},
            self.asked.evaluation,
            self.reply.evaluation,
            self.asked.rollouts,
            teacher_source=self.asked.teacher,
            teacher=self.reply.teacher,
        )

    @cached_property
    def setting(self) -> Setting:
        """A CPU on which everything is allowed, however much of the rows it drops."""
        allowed = frozenset({GLOBAL_BATCH, *(technique.name for technique in self.trainer.techniques)})
        return Setting(self.workload, CPU, DOCUMENTS_PER_STEP, token_coverage=0.0, allowed=allowed)

    @cached_property
    def baseline(self) -> Candidate:
        """TRL's default."""
        return problem(self.setting, trainer=self.trainer.name).baseline

    def candidate(self, choices: Mapping[str, Choice]) -> Candidate:
        """Return the baseline with other choices, in its normal form."""
        return self.trainer.normal(self.baseline.but(**choices), self.setting)

    def plan(self, choices: Mapping[str, Choice]) -> TrainingPlan:
        """Return the plan of the baseline with other choices, which no rule of autotune may forbid."""
        candidate = self.candidate(choices)
        assert self.trainer.illegal(candidate, self.setting) is None
        return self.trainer.plan(candidate, self.setting)

    def geometry(self, plan: TrainingPlan) -> BatchGeometry:
        """Return the specification's micro-batches of a plan on these rows."""
        return self.trainer.geometry(plan, self.reply.dataset.documents)

    def request(self, plan: TrainingPlan, schedule: Schedule = WHOLE_STEPS) -> ProbeRequest:
        """Return the request for a probe of a plan on these rows."""
        rows, evaluated = self.reply.dataset.tokenized_directory, self.reply.evaluation
        where = evaluated.tokenized_directory if evaluated is not None else None
        return ProbeRequest(plan, self.asked.model, "cpu", rows, schedule, evaluation_directory=where)

    def built(self, plan: TrainingPlan, folder: Path) -> Any:
        """Return TRL's trainer on these rows, with TRL's default order."""
        # First: a configuration that is made after a trainer takes accelerate's state from it.
        untold = self.adapter.config(output_dir=str(folder), use_cpu=True, bf16=False, report_to="none")
        request = self.request(plan)
        rows = self.adapter.cut(self.rows, plan)
        trainer = build_trainer(request, rows, folder, Progress(request.schedule, METERS["cpu"]()))
        trainer.args.train_sampling_strategy = untold.train_sampling_strategy
        return trainer


def prepared_rows(
    trainer: Trainer,
    rows: Rows,
    model: Path,
    folder: Path,
    *,
    evaluated: Rows | None = None,
    rollouts: Rollouts | None = None,
    reading: Mapping[str, object] | None = None,
) -> Prepared:
    """Return rows that a ``prepare`` job of a trainer, run in this process, has tokenised.

    Args:
        evaluated: rows to evaluate on.
        reading: fields of its configuration by which it reads them.

    Raises:
        InputError: the trainer cannot use them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    named = {"rows": rows, "evaluated": evaluated}
    files = [write_rows(folder / f"{name}.jsonl", some) for name, some in named.items() if some is not None]
    source, *others = (DatasetSource(file.name, "json", str(file), reading=reading or {}) for file in files)
    asked = PrepareRequest(
        ModelSource(str(model)),
        source,
        trainer.name,
        str(folder / "tokenized"),
        others[0] if others else None,
        str(folder / "evaluation"),
        rollouts or Rollouts(),
        # A model of the same vocabulary is its own teacher.
        teacher=ModelSource(str(model)) if trainer.has_teacher else None,
    )
    return Prepared(trainer, asked, prepare(asked, JobContext(folder, time.monotonic())))


def prepared_sample(trainer: Trainer, form: str, model: Path, folder: Path) -> Prepared:
    """Return sample rows of a format, tokenised."""
    return prepared_rows(trainer, sample_rows(trainer.name, form), model, folder)
