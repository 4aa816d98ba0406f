"""A plan of a distillation names the teacher that was read, in place of the one in a user's configuration."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.core.plan import TrainingPlan
from autotune.core.workload import ModelSource
from autotune.trainers.distillation import TEACHER, TEACHER_REVISION, TRAINER
from tests.settings import workload

SIZES = {
    TEACHER: "first",
    "max_completion_length": 16,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 1,
}


@pytest.mark.parametrize(
    ("written", "revision", "found"),
    [({}, "main", None), ({}, "v2", "v2"), ({TEACHER_REVISION: "v1"}, "main", "main")],
)
def test_another_teacher_does_not_keep_the_revision_of_the_one_before(
    written: dict[str, object], revision: str, found: str | None
) -> None:
    plan = TrainingPlan("distillation", {**written, **SIZES})
    of = replace(workload(), teacher_source=ModelSource("second", revision=revision))
    completed = TRAINER.completed(plan, of)
    assert completed.args[TEACHER] == "second"
    assert completed.args.get(TEACHER_REVISION) == found
