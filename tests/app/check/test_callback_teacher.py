"""The callback checks distillation with the trainer's own teacher model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import load_dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import DistillationConfig, DistillationTrainer

import autotune
from autotune.api import preflight
from autotune.app.arguments import CheckArguments
from autotune.core.documents.verdict import Outcome, Verdict, WillNotFit
from autotune.userconfig.objects import configuration_of


def distillation(model: Path, file: Path, folder: Path, budget: str, named: str | None) -> Any:
    """Return a trainer with a teacher of twice the intermediate size of the student, in bfloat16."""
    student = AutoModelForCausalLM.from_pretrained(model)
    wide = AutoConfig.from_pretrained(model)
    wide.intermediate_size *= 2
    return DistillationTrainer(
        model=student,
        teacher_model=AutoModelForCausalLM.from_config(wide, dtype="bfloat16"),
        args=DistillationConfig(
            output_dir=str(folder), use_cpu=True, bf16=False, report_to="none", max_steps=1, max_completion_length=8,
            teacher_model_name_or_path=named,
        ),
        processing_class=AutoTokenizer.from_pretrained(model),
        train_dataset=load_dataset("json", data_files=str(file), split="train"),
        callbacks=[autotune.PreflightCallback(memory_budget=budget)],
    )  # fmt: skip


@pytest.mark.slow
def test_the_teacher_of_the_trainer_is_checked_and_not_one_that_the_configuration_names(
    small_model_directory: Path, rows: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[object, object]] = []

    def checked(given: CheckArguments, *_: object, **__: object) -> Verdict:
        values = configuration_of(given.config).values
        teacher = json.loads((Path(str(values["teacher_model_name_or_path"])) / "config.json").read_text())
        loading: Any = values["teacher_model_init_kwargs"]
        asked.append((teacher["intermediate_size"], loading["dtype"]))
        return Verdict(Outcome.FITS, "fits", budget_bytes=0)

    monkeypatch.setattr(preflight, "check_object", checked)
    own = AutoConfig.from_pretrained(small_model_directory).intermediate_size
    file, named = rows("grpo"), str(small_model_directory)
    training = distillation(small_model_directory, file, tmp_path, "4GiB", named)
    training.create_optimizer()
    given = {"model": training.model, "processing_class": training.processing_class, "train_dataloader": None}
    autotune.PreflightCallback(dataset=file)._verdict(training.args, training, given, None)
    assert asked == [(2 * own, "bfloat16")]
    assert training.args.teacher_model_name_or_path == named


@pytest.mark.slow
def test_a_distillation_whose_configuration_names_no_teacher_is_stopped_where_it_will_not_fit(
    small_model_directory: Path, rows: Callable[[str], Path], tmp_path: Path
) -> None:
    training = distillation(small_model_directory, rows("grpo"), tmp_path, "1MiB", None)
    with pytest.raises(WillNotFit, match="does not fit: "):
        training.train()
