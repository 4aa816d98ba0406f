"""A check of distillation reports a missing teacher or another vocabulary, and counts the teacher's memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from autotune.core.documents.verdict import Outcome
from autotune.trainers.distillation import TEACHER, TEACHER_LOADING
from tests.app.check.beginning import HEAD
from tests.app.check.conftest import Checked
from tests.small import write_small_model

CPU = "use_cpu: true\nbf16: false\nmax_completion_length: 24\n"
Write = Callable[[str], str]


@pytest.fixture
def write(model: Path, rows: Callable[[str], Path], tmp_path: Path) -> Write:
    """Write a configuration of a distillation, and return its file."""

    def written(body: str) -> str:
        file = tmp_path / "config.yaml"
        file.write_text(HEAD.format(name="", model=model, rows=rows("distillation")) + CPU + body, encoding="utf-8")
        return str(file)

    return written


def test_without_a_teacher_it_cannot_run(write: Write, checked: Checked) -> None:
    verdict = checked(config=write(""), trainer="distillation")
    assert verdict.outcome is Outcome.CANNOT_RUN
    assert any("names no teacher" in item.message for item in verdict.findings)


def test_a_teacher_of_another_vocabulary_cannot_run(write: Write, checked: Checked, tmp_path: Path) -> None:
    teacher = write_small_model(tmp_path / "teacher", weights=False, vocab_size=640)
    verdict = checked(config=write(f"{TEACHER}: {teacher}\n"), trainer="distillation")
    assert (verdict.outcome, verdict.exit_code) == (Outcome.CANNOT_RUN, 2)
    assert any("has a vocabulary of 640 tokens" in item.message for item in verdict.findings)


def parameter_bytes(checked: Checked, **asked: object) -> int:
    verdict = checked(trainer="distillation", **asked)
    assert verdict.need is not None, verdict.headline
    assert verdict.need.memory is not None
    return int(verdict.need.memory.breakdown["parameter"])


@pytest.mark.nightly
def test_weights_of_the_teacher_are_counted_in_the_type_that_it_is_loaded_in(
    write: Write, checked: Checked, model: Path, tmp_path: Path
) -> None:
    teacher = write_small_model(tmp_path / "teacher", weights=False, hidden_size=128, num_hidden_layers=5)
    named, half = f"{TEACHER}: {teacher}\n", f"{TEACHER_LOADING}: {{dtype: bfloat16}}\n"
    whole, halved = (parameter_bytes(checked, config=write(named + more)) for more in ("", half))
    alone = parameter_bytes(checked, config=write(f"{TEACHER}: {model}\n")) // 2
    assert whole - halved == pytest.approx((whole - alone) / 2, rel=0.001)
    # The trained model's own type is the teacher's too, where nothing else is written.
    assert parameter_bytes(checked, config=write(f"{named}dtype: bfloat16\n")) == pytest.approx(whole / 2, rel=0.001)


@pytest.mark.parametrize(
    ("stored", "loading", "share"),
    [
        pytest.param("float32", {}, 1.0, marks=pytest.mark.nightly),
        ("bfloat16", {}, 0.5),
        pytest.param("float32", {"dtype": "bfloat16"}, 0.5, marks=pytest.mark.nightly),
    ],
)
def test_the_class_alone_loads_the_teacher_in_its_own_type_whatever_the_model_is_in(
    stored: str,
    loading: Mapping[str, str],
    share: float,
    checked: Checked,
    model: Path,
    rows: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    from trl import DistillationConfig

    teacher = write_small_model(tmp_path / "teacher", weights=False, dtype=stored)
    config = DistillationConfig(
        str(tmp_path),
        use_cpu=True,
        bf16=False,
        max_completion_length=24,
        model_init_kwargs={"dtype": "bfloat16"},
        teacher_model_name_or_path=str(teacher),
        teacher_model_init_kwargs=dict(loading) or None,
    )
    found = parameter_bytes(checked, config=config, model=str(model), dataset=str(rows("distillation")))
    # The teacher is as large as the model.
    assert found == pytest.approx((0.5 + share) * whole_bytes(model), rel=0.001)


def whole_bytes(model: Path) -> int:
    """Return the bytes of a model in float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    built = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    return int(4 * sum(tensor.numel() for tensor in built.parameters()))
