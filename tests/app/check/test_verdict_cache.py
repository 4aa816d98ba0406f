"""A cached verdict depends on every file that determines it, including files that other files name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from autotune.app.arguments import CheckArguments
from autotune.app.check.verdict_cache import judged_for_budget, key_of
from autotune.app.planned import planned_machine
from autotune.core.documents.estimate import MemoryEstimate
from autotune.core.documents.verdict import Need, Outcome, Source, Verdict
from autotune.emit.launch import ACCELERATE, DEEPSPEED, launch_files
from autotune.trainers.distillation import TEACHER
from autotune.units import GIB
from autotune.userconfig.written import read_written
from tests.app.check.conftest import Write
from tests.emit.test_launch import HERE
from tests.settings import plan_with

SCRIPT = "from trl import SFTConfig, SFTTrainer, TrlParser\n"


def key(asked: CheckArguments) -> str:
    found = key_of(asked, read_written(asked.file, asked.trainer, asked.command), planned_machine("H100-80GB"))
    assert found is not None
    return found


def zero(stage: int) -> str:
    return json.dumps({"zero_optimization": {"stage": stage}})


def accelerated(named: object) -> str:
    return yaml.safe_dump({"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": str(named)}})


def test_a_document_that_a_bundle_s_accelerate_yaml_names_is_part_of_the_key(write: Write, tmp_path: Path) -> None:
    for name, text in launch_files(plan_with(HERE, {"sharding": "zero3"}), tmp_path).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert str(tmp_path / DEEPSPEED) in (tmp_path / ACCELERATE).read_text(encoding="utf-8")
    asked = CheckArguments(str(write("sft", f"accelerate_config: {tmp_path / ACCELERATE}\n")), trainer="sft")
    before = key(asked)
    (tmp_path / DEEPSPEED).write_text(zero(2), encoding="utf-8")
    assert key(asked) != before


def test_a_variable_that_accelerate_reads_is_part_of_the_key(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = CheckArguments(str(write("sft", "")), trainer="sft")
    before = key(asked)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert key(asked) != before


@pytest.mark.parametrize("folder", [".", "launch"], ids=["of the process", "of the document"])
def test_a_relative_path_leads_from_either_folder_that_the_check_reads_it_from(
    folder: str, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / ACCELERATE).write_text(accelerated("own.json"), encoding="utf-8")
    asked = CheckArguments(str(write("sft", f"accelerate_config: launch/{ACCELERATE}\n")), trainer="sft")
    (tmp_path / folder / "own.json").write_text(zero(2), encoding="utf-8")
    before = key(asked)
    (tmp_path / folder / "own.json").write_text(zero(3), encoding="utf-8")
    assert key(asked) != before


def test_the_trainer_s_own_document_may_lie_beside_accelerate_s(write: Write, tmp_path: Path) -> None:
    """As :func:`autotune.userconfig.engine.engine_args` reads it."""
    folder = tmp_path / "launch"
    folder.mkdir()
    (folder / ACCELERATE).write_text("distributed_type: MULTI_GPU\n", encoding="utf-8")
    body = f"accelerate_config: {folder / ACCELERATE}\ndeepspeed: beside.json\n"
    asked = CheckArguments(str(write("sft", body)), trainer="sft")
    (folder / "beside.json").write_text(zero(2), encoding="utf-8")
    before = key(asked)
    (folder / "beside.json").write_text(zero(3), encoding="utf-8")
    assert key(asked) != before


@pytest.mark.parametrize("named", ["--output_dir ", "--output_dir=", "--run_name "])
def test_what_lies_in_a_folder_of_neither_model_nor_data_is_no_part_of_the_key(
    named: str, write: Write, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    asked = CheckArguments(f"trl sft --config {write('sft', '')} {named}{tmp_path / 'out'}")
    before = key(asked)
    (tmp_path / "out" / "checkpoint").touch()
    assert key(asked) == before


def test_a_file_that_cannot_be_read_is_part_of_the_key_by_its_name(write: Write) -> None:
    assert key(CheckArguments(f"trl sft --config {write('sft', '')} --run_name /proc/self/mem"))


@pytest.mark.parametrize("joined", [" ", "="])
def test_a_file_is_found_however_a_word_of_the_command_names_it(joined: str, write: Write, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    file = tmp_path / "launch.yaml"
    (tmp_path / "own.json").write_text(zero(2), encoding="utf-8")
    file.write_text(accelerated(tmp_path / "own.json"), encoding="utf-8")
    words = f"accelerate launch --config_file{joined}{file} {tmp_path / 'train.py'} --config {write('sft', '')}"
    asked = CheckArguments(tuple(words.split()))
    before = key(asked)
    (tmp_path / "own.json").write_text(zero(3), encoding="utf-8")
    after = key(asked)
    assert after != before
    file.write_text("num_processes: 2\n", encoding="utf-8")
    assert key(asked) != after


def test_a_verdict_on_what_lies_elsewhere_is_not_kept(write: Write) -> None:
    file = write("distillation", "")
    asked = CheckArguments(str(file), trainer="distillation")
    assert key(asked)
    text = file.read_text(encoding="utf-8")
    file.write_text(re.sub(f"^{TEACHER}: .*$", f"{TEACHER}: some/teacher", text, flags=re.MULTILINE), encoding="utf-8")
    by_words = ("trl", "sft", "--config", str(write("sft", "", "sft.yaml")), "--model_name_or_path", "some/model")
    for each in (asked, CheckArguments(by_words)):
        assert key_of(each, read_written(each.file, each.trainer, each.command), planned_machine("H100-80GB")) is None


def test_neither_broken_documents_nor_those_that_name_one_another_keep_a_check_from_its_key(
    write: Write, tmp_path: Path
) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "second.json"
    first.write_text(yaml.safe_dump({"also": str(second), "too": ["\0", "x" * 5000]}), encoding="utf-8")
    second.write_text(json.dumps([str(first), str(tmp_path)]), encoding="utf-8")
    asked = CheckArguments(str(write("sft", f"accelerate_config: {first}\n")), trainer="sft")
    before = key(asked)
    # What lies in a folder that a document names, such as one for checkpoints, decides nothing.
    (tmp_path / "unrelated.bin").write_bytes(b"0")
    assert key(asked) == before
    for depth in (900, 980, 20_000):
        second.write_text("[" * depth + "]" * depth, encoding="utf-8")
        assert key(asked) != before


def of_device_and_host(outcome: Outcome, budget_bytes: int) -> Verdict:
    """Return a verdict on a need of 10 GiB of the device, and of 64 GiB of the host."""
    memory = MemoryEstimate(10 * GIB, 10 * GIB, 0, {}, 64 * GIB, None, 0.1, machine_bytes=64 * GIB)
    need = Need(Source.TRACED, 10 * GIB, 9 * GIB, 11 * GIB, 1, 64, memory=memory)
    return Verdict(outcome, "", budget_bytes=budget_bytes, need=need)


@pytest.mark.parametrize(("outcome", "budget"), [(Outcome.TOO_CLOSE, 80), (Outcome.TOO_CLOSE, 10), (Outcome.FITS, 80)])
def test_another_budget_of_the_device_does_not_help_a_host_that_has_too_little(outcome: Outcome, budget: int) -> None:
    known = of_device_and_host(outcome, budget * GIB)
    assert judged_for_budget(known, 40 * GIB, 32 * GIB) is None
    for enough in (128 * GIB, None):
        found = judged_for_budget(known, 40 * GIB, enough)
        assert found is not None
        assert found.outcome is Outcome.FITS
    # The same budget is no other question.
    assert judged_for_budget(known, budget * GIB, 32 * GIB) is known


def test_a_script_that_a_module_names_and_a_file_in_the_text_for_a_shell_are_part_of_the_key(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "launch.yaml").write_text("distributed_type: MULTI_GPU\n", encoding="utf-8")
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    text = f"accelerate launch --config_file launch.yaml -m train --config {write('sft', '')}"
    asked = CheckArguments(("bash", "-c", text))
    keys = {key(asked)}
    for name in ("launch.yaml", "train.py"):
        with (tmp_path / name).open("a", encoding="utf-8") as file:
            file.write("# changed\n")
        keys.add(key(asked))
    assert len(keys) == 3
