"""Configurations of every trainer get their verdicts, with all problems at once, line numbers and removed keys."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from transformers import TrainingArguments

from autotune.core.configuration import Fault, Override, ReadCommand
from autotune.core.documents.verdict import EXIT_CODES, Finding, Outcome, Severity
from autotune.trainers import trainers
from autotune.userconfig.problems import problems
from autotune.userconfig.written import read_written
from tests.app.check.configurations import CASES, Case
from tests.app.check.conftest import Checked, Write


def test_every_trainer_has_at_least_four() -> None:
    counts = Counter(case.trainer for case in CASES)
    assert set(counts) == set(trainers())
    assert min(counts.values()) >= 4
    assert len(CASES) >= 30


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=pytest.mark.nightly if case.nightly else ()) for case in CASES],
)
def test_a_configuration_gets_its_verdict(case: Case, write: Write, checked: Checked) -> None:
    file = write(case.trainer, case.body)
    verdict = checked(config=str(file), trainer=case.trainer, gpu=case.gpu, memory_budget=case.memory_budget)
    told = "\n".join(f"{item.line} {item.message}" for item in verdict.findings)
    assert verdict.outcome is case.outcome, f"{verdict.headline}\n{told}"
    assert verdict.exit_code == EXIT_CODES[case.outcome]
    for said, line in case.says.items():
        found = next((item for item in verdict.findings if said in item.message), None)
        assert found is not None, f"{said!r} is not in:\n{told}"
        assert found.line == (None if line is None else case.first + line)
    if case.outcome in (Outcome.FITS, Outcome.DOES_NOT_FIT):
        assert verdict.need is not None
        assert verdict.need.least_bytes < verdict.need.bytes < verdict.need.most_bytes


@pytest.mark.parametrize(
    ("trainer", "body", "key"),
    [
        ("kto", "per_device_train_batch_size: 1\ngradient_accumulation_steps: 8\n", "per_device_train_batch_size"),
        ("sft", "packing: true\npacking_strategy: ffd\n", "packing_strategy"),
    ],
)
def test_what_a_rule_says_is_not_said_again_in_trl_s_words(
    trainer: str, body: str, key: str, write: Write, checked: Checked
) -> None:
    verdict = checked(config=str(write(trainer, body)), trainer=trainer, gpu="H100-80GB")
    (found,) = (item for item in verdict.findings if item.severity is Severity.ERROR)
    assert (found.key, verdict.reason) == (key, "1 thing is wrong")


WENT = (
    "warmup_ratio was removed in transformers 5.15.0: write warmup_steps: 0.1."
    " warmup_steps below 1 is a share of all steps."
)


def problems_of(folder: Path, text: str, read: ReadCommand, trainer: str = "sft", **more: bool) -> tuple[Finding, ...]:
    """Return the problems of a file with this text."""
    file = folder / "config.yaml"
    file.write_text(text, encoding="utf-8")
    return problems(read_written(str(file), trainer), read, **more)


@pytest.mark.parametrize(
    ("read", "severity"),
    [
        (ReadCommand(), Severity.NOTE),
        (ReadCommand(faults=(Fault("warmup_ratio", "unknown", unknown=True),)), Severity.ERROR),
    ],
    ids=["an older release takes it", "the installed release has no such field"],
)
def test_a_key_that_went_is_an_error_where_the_installed_release_does_not_take_it(
    read: ReadCommand, severity: Severity, tmp_path: Path
) -> None:
    (found,) = problems_of(tmp_path, "warmup_ratio: 0.1\n", read)
    assert (found.severity, found.message) == (severity, WENT)


def test_words_of_fsdp_are_no_silent_change_since_transformers_writes_them_to_its_keys(tmp_path: Path) -> None:
    read = ReadCommand(overrides=(Override("fsdp", "full_shard", True),))
    (found,) = problems_of(tmp_path, "fsdp: full_shard\n", read)
    assert (found.severity, found.line) == (Severity.NOTE, 1)
    keys: dict[str, bool] = {}
    if translate := getattr(TrainingArguments, "_apply_legacy_fsdp_to_config", None):
        for word, key in (("full_shard", "reshard_after_forward: true"), ("offload", "cpu_offload: true")):
            translate(word, keys)
            assert f"{key} for {word}" in found.message
        assert keys == {"reshard_after_forward": True, "cpu_offload": True}


def test_an_argument_that_ends_a_training_is_told_in_place_of_what_trl_s_class_refuses(tmp_path: Path) -> None:
    read = ReadCommand(
        faults=(Fault("packing", "", unknown=True),),
        refused="ZeroDivisionError: integer modulo by zero",
        ended={"num_generations": "ZeroDivisionError: integer modulo by zero"},
    )
    found = problems_of(tmp_path, "num_generations: 0\npacking: true\n", read, "grpo")
    assert [(item.line, item.message) for item in found] == [
        (1, "num_generations makes training fail: ZeroDivisionError: integer modulo by zero."),
        (2, "packing is a key of sft, and not of grpo."),
    ]


def test_a_file_may_be_in_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.joinpath("mine.yaml").write_text("packing: true\n", encoding="utf-8")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read_written("~/mine.yaml").place == f"{tmp_path}/mine.yaml"


@pytest.mark.parametrize(("here", "severity"), [(True, Severity.ERROR), (False, Severity.NOTE)])
def test_what_needs_a_package_that_is_absent_ends_a_training_on_this_machine(
    here: bool, severity: Severity, tmp_path: Path
) -> None:
    read = ReadCommand(absent={"report_to": "It names wandb."})
    (found,) = problems_of(tmp_path, "report_to: wandb\n", read, here=here)
    assert (found.severity, found.line) == (severity, 1)
