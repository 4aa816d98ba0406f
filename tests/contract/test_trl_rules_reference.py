"""Contract with TRL: what its trainers with a reference model refuse, or pass over, is what the catalogue says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trl
from datasets import Dataset

from autotune.core.candidate import Candidate, Choice
from autotune.core.plan import TrainingPlan
from autotune.core.setting import Setting
from autotune.trainers import find_trainer
from autotune.trainers.kto import WITHOUT_KL
from tests.settings import GPU, setting

Build = Callable[..., Any]

ROWS = {
    "dpo": [{"prompt": f"a b {place}", "chosen": " c d" * (1 + place % 3), "rejected": " c"} for place in range(8)],
    "kto": [{"prompt": f"a b {place}", "completion": " c d" * (1 + place % 3), "label": place % 2 == 0}
            for place in range(8)],
}  # fmt: skip
TRAINERS = pytest.mark.parametrize("trainer", ROWS)


@pytest.fixture
def build(small_model_directory: Path, tmp_path: Path) -> Build:
    """Return a function that makes TRL's trainer of a name on the small model from configuration fields."""

    def built(trainer: str, **args: Any) -> Any:
        known = find_trainer(trainer)
        common = {
            "use_cpu": True, "bf16": False, "max_steps": 1, "report_to": "none", "save_strategy": "no",
            "per_device_train_batch_size": 4, "disable_tqdm": True, "gradient_accumulation_steps": 2,
        }  # fmt: skip
        config = getattr(trl, known.config_class)(str(tmp_path / "out"), **{**common, **args})
        rows = Dataset.from_list(ROWS[trainer])
        return getattr(trl, known.trainer_class)(str(small_model_directory), args=config, train_dataset=rows)

    return built


def illegal(trainer: str, **choices: Choice) -> str | None:
    """Return why a candidate is illegal on a GPU where everything is allowed."""
    known, here = find_trainer(trainer), of(trainer)
    baseline = Candidate({item.name: item.default(here) for item in known.techniques}).but(max_length=2000)
    return known.illegal(known.normal(baseline.but(**choices), here), here)


def of(trainer: str, *allowed: str) -> Setting:
    """Return a setting of a trainer."""
    here = setting(machine=GPU)
    return replace(here, workload=replace(here.workload, trainer=trainer), allowed=frozenset(allowed))


@TRAINERS
def test_keys_of_transformers_reach_pytorch_after_the_reference_s_pass(trainer: str, build: Build) -> None:
    words = {"gradient_checkpointing_kwargs": {"every_n_layers": 2}}
    with pytest.raises(ValueError, match="every_n_layers"):
        build(trainer, **words).train()
    assert "needs reference=precomputed" in str(illegal(trainer, gradient_checkpointing="every_2"))
    assert "needs reference=precomputed" in str(illegal(trainer, gradient_checkpointing="offload"))

    build(trainer, precompute_ref_log_probs=True, **words).train()
    for choice in ("every_2", "offload"):
        assert illegal(trainer, gradient_checkpointing=choice, reference="precomputed") is None


@TRAINERS
def test_selective_checkpointing_is_refused_by_pytorch(trainer: str, build: Build) -> None:
    words = {"gradient_checkpointing_kwargs": {"selective": True}}
    with pytest.raises(ValueError, match="selective"):
        build(trainer, precompute_ref_log_probs=True, **words).train()
    assert "refuses it" in str(illegal(trainer, gradient_checkpointing="selective", reference="precomputed"))


def test_kto_needs_two_rows_in_a_micro_batch(build: Build) -> None:
    with pytest.raises(ValueError, match="batch size must be > 1"):
        build("kto", per_device_train_batch_size=1)
    known, here = find_trainer("kto"), of("kto", "per_device_train_batch_size")
    baseline = Candidate({item.name: item.default(here) for item in known.techniques}).but(max_length=2000)
    assert "at least 2" in str(known.illegal(baseline.but(per_device_train_batch_size=1), here))
    assert known.illegal(baseline.but(per_device_train_batch_size=2), here) is None


def test_kto_needs_one_row_where_no_kl_divergence_is_estimated(build: Build) -> None:
    args = {"per_device_train_batch_size": 1, "loss_type": min(WITHOUT_KL)}
    trainer = build("kto", **args)
    trainer.train()
    assert trainer.state.global_step > 0
    plan = TrainingPlan("kto", {**args, "gradient_accumulation_steps": 1})
    assert find_trainer("kto").refused(plan, of("kto", "beta").workload) is None


def test_the_batch_size_is_part_of_kto_s_objective(build: Build) -> None:
    answers = [build("kto", per_device_train_batch_size=rows).train_dataset["KL_completion_ids"][:] for rows in (4, 8)]
    assert answers[0] != answers[1]
    assert "changes training here (KTO exchanges answers" in str(illegal("kto", per_device_train_batch_size=4))
    assert illegal("kto", per_device_train_batch_size=8) is None
    assert illegal("dpo", per_device_train_batch_size=4) is None


def test_kto_ends_after_no_step_where_it_drops_all_rows(build: Build) -> None:
    trainer = build("kto", max_length=2)
    trainer.train()
    assert trainer.state.global_step == 0
