"""A configuration of any trainer can be a base: its plan is what TRL reads, and an edit of it reads as wanted."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.trainers import Trainer, trainers
from autotune.userconfig.edit import Wanted, edits_of, rewritten
from tests.app.bases import ROWS, a_base, disagreements, started
from tests.trainers.conftest import Prepare

TEXT = """\
learning_rate: 1e-5  # mine
max_grad_norm: 0.5
optim: adafactor
gradient_checkpointing: false
per_device_train_batch_size: 8
gradient_accumulation_steps: 3
"""


@pytest.mark.parametrize("trainer", trainers().values(), ids=lambda trainer: trainer.name)
@pytest.mark.parametrize("adapter", ["", "use_peft: true\nlora_r: 4\nlora_target_modules: [q_proj, v_proj]\n"])
def test_the_baseline_trains_as_trl_does_by_the_file(
    trainer: Trainer, adapter: str, prepared: Prepare, tmp_path: Path
) -> None:
    workload = prepared(trainer, trainer.formats[0].name).setting.workload
    base = a_base(tmp_path, TEXT + adapter, trainer.name)
    search = started(base, of=workload)
    assert disagreements(base, search.plan) == {}
    documents = workload.dataset.documents
    assert trainer.geometry(search.plan, documents) == trainer.geometry(
        trainer.completed(base.plan, workload), documents
    )
    assert search.problem.choices["optimizer"] == ("adafactor",)
    other = search.problem.normal(search.problem.baseline.but(gradient_checkpointing="on"))
    plan = trainer.plan(other, search.problem.setting)
    text = rewritten(base, edits_of(base, Wanted(plan), trainer, search.problem.setting))
    assert "learning_rate: 1e-5  # mine\n" in text
    assert disagreements(a_base(tmp_path, text.removeprefix(ROWS), trainer.name, "after.yaml"), plan) == {}
