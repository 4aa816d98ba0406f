"""The words of a command are parsed as by TRL's command: by its own parser, then by accelerate's."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from unittest import mock

import pytest
from trl.cli.accelerate_launcher import launch_training_script
from trl.cli.commands.base import CommandContext
from trl.cli.commands.training import TrainingCommand

from autotune.app.arguments import CheckArguments
from autotune.app.check.check import _target_machine
from autotune.core.documents.verdict import Outcome, Severity
from autotune.userconfig.written import read_written
from tests.app.check.conftest import Checked, Write


def trl_starts(words: tuple[str, ...]) -> bool:
    """Return whether ``trl sft`` would start TRL's script, which is not started here."""
    script: list[str] = []

    def launch(**asked: object) -> None:
        launch_training_script(**asked, launch_command_fn=lambda arguments: script.append(arguments.training_script))

    with mock.patch("trl.cli.accelerate_launcher.launch_training_script", launch):
        try:
            TrainingCommand("sft").run(Namespace(), CommandContext(["sft", *words]))
        except (SystemExit, ValueError):
            return False
    return script[0].endswith("sft.py")


@pytest.mark.parametrize(
    ("body", "ignored"),
    [
        ("dataset_name: other\ndataset_streaming: true\n", ["dataset_name", "dataset_streaming"]),
        ("dataset_streaming: false\nstreaming: true\nmax_steps: 3\n", []),
        ("datasets: []\ndataset_name: other\nstreaming: true\n", ["streaming"]),
    ],
)
def test_a_key_of_rows_that_trl_ignores_is_told(
    body: str, ignored: list[str], tmp_path: Path, checked: Checked
) -> None:
    head = "model_name_or_path: model\noutput_dir: out\nreport_to: none\n"
    rows = "" if "datasets" in body else "datasets: [{path: hub/id}]\n"
    (tmp_path / "own.yaml").write_text(f"{head}{rows}{body}", encoding="utf-8")
    verdict = checked(config=str(tmp_path / "own.yaml"), trainer="sft", fits=False)
    assert [item.key for item in verdict.findings if "has no effect together with" in item.message] == ignored


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--max_length 32 --num_processes 2", None),
        ("--multi_gpu --accelerate_config zero2", None),
        ("--max_lengt 32", None),
        ("--max_seq_length 32", "max_seq_length was removed in TRL 0.20.0: write max_length: 32."),
        ("--max-seq-length=32", "max_seq_length was removed in TRL 0.20.0: write max_length: 32."),
        ("--beta 0.1", "beta is a key of distillation, dpo, grpo, kto, online_dpo, rloo, and not of sft."),
        ("--packin_strategy bfd", "Did you mean packing_strategy?"),
        ("--mine", "mine is not a key of sft, of the model, of the data, or of accelerate."),
        ("mine.yaml", "mine.yaml is neither an option nor the value of one. A file is named by --config."),
        ("--num_processes many", "invalid int value: 'many'"),
    ],
)
def test_a_word_that_ends_trl_s_command_is_told_and_no_other(
    words: str, said: str | None, write: Write, checked: Checked
) -> None:
    own = ("--config", str(write("sft", "use_cpu: true\nbf16: false\n")), *words.split())
    verdict = checked(command=("trl", "sft", *own), fits=False)
    errors = [item.message for item in verdict.findings if item.severity is Severity.ERROR]
    assert (verdict.outcome is Outcome.READ) is trl_starts(own) is (said is None), errors
    if said is not None:
        assert len(errors) == 1
        assert said in errors[0]


def test_words_that_trl_has_not_are_told_beside_one_that_it_refuses(write: Write, checked: Checked) -> None:
    own = (
        "--config",
        str(write("sft", "use_cpu: true\n")),
        *["--max_seq_length", "32", "--no_remove_unused_columns", "--bf16"],
    )
    verdict = checked(command=("trl", "sft", *own), fits=False)
    assert not trl_starts(own)
    assert {item.key: item.message for item in verdict.findings if item.severity is Severity.ERROR} == {
        "max_seq_length": "max_seq_length was removed in TRL 0.20.0: write max_length: 32.",
        "bf16": "TRL refuses it: argument --bf16: expected one argument. Write --bf16 true.",
    }


@pytest.mark.parametrize("parser", ["trl import TrlParser", "transformers import HfArgumentParser"])
def test_words_of_a_script_that_trl_has_not_may_be_the_script_s_own(
    parser: str, checked: Checked, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"from trl import SFTConfig, SFTTrainer\nfrom {parser}\n", encoding="utf-8")
    own = "--output_dir out --max_length 64 --max_seq_length 64 --mine 3 rows.json"
    verdict = checked(command=("python", str(script), *own.split()), fits=False)
    assert [(item.key, item.severity) for item in verdict.findings] == [
        ("max_seq_length", Severity.ERROR),
        ("mine", Severity.NOTE),
        ("rows.json", Severity.NOTE),
    ]


def test_words_that_a_script_declares_itself_are_neither_old_names_nor_short_ones(
    checked: Checked, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    own = "class MyArguments:\n    max_seq_length: int = 64\n    dataset: str = ''\n    lr: float = 0.0\n"
    script.write_text(f"from trl import SFTConfig, SFTTrainer, TrlParser\n{own}", encoding="utf-8")
    words = "--output_dir out --max_seq_length 64 --dataset mine --lr 1"
    verdict = checked(command=("python", str(script), *words.split()), fits=False)
    assert [(item.key, item.severity) for item in verdict.findings] == [
        (key, Severity.NOTE) for key in ("max_seq_length", "dataset", "lr")
    ]
    # TRL's own short words are read where the script has none of its own.
    short = checked(command=("python", str(script), "--output_dir", "out", "--max_len", "x"), fits=False)
    assert "max_length" in short.findings[0].message


@pytest.mark.parametrize(
    ("body", "words", "said"),
    [
        ("multi_gpu: true\n", "", "multi_gpu cannot be in the file"),
        ("use_fsdp: false\n", "", "use_fsdp cannot be in the file"),
        ("accelerate_config: multi_gpu\n", "--accelerate_config zero2", "accelerate_config is read once"),
        ("", "--accelerate_config=zero2", "accelerate_config is read once"),
        ("", "--accelerate-config zero2", "accelerate_config is read once"),
        ("", "--accelerate_config zero9", "accelerate_config: Accelerate config zero9 is neither a file nor"),
        ("accelerate_config: multi_gpu\n", "", None),
    ],
)
def test_what_trl_hands_on_and_accelerate_refuses_is_refused(
    body: str, words: str, said: str | None, write: Write, checked: Checked
) -> None:
    own = ("--config", str(write("sft", f"use_cpu: true\nbf16: false\n{body}")), *words.split())
    verdict = checked(command=("trl", "sft", *own), fits=False)
    errors = [item.message for item in verdict.findings if item.severity is Severity.ERROR]
    assert (verdict.outcome is Outcome.READ) is trl_starts(own) is (said is None), errors
    assert len(errors) == (said is not None)
    assert all(said in error for error in errors if said is not None)


@pytest.mark.parametrize(
    ("body", "words", "on_cpu"),
    [
        ("use_cpu: true\n", "", True),
        ("use_cpu: true\n", "--use_cpu False", False),
        ("", "--use_cpu", True),
        ("", "--use_cpu=true", True),
        ("", "--use-cpu", True),
        ("", "--use_cpu False", False),
        ("", "", False),
    ],
)
def test_a_check_is_for_a_cpu_where_the_training_is(body: str, words: str, on_cpu: bool, write: Write) -> None:
    command = ("trl", "sft", "--config", str(write("sft", body)), *words.split())
    planned, _ = _target_machine(CheckArguments(command, fits=False), read_written(None, None, command))
    assert (planned is not None) is on_cpu


def test_trl_reads_the_name_of_its_file_in_a_word_of_its_own(write: Write, checked: Checked) -> None:
    own = (f"--config={write('sft', '')}",)
    assert not trl_starts(own)
    verdict = checked(command=("trl", "sft", *own), fits=False)
    assert "TRL reads `--config FILE`, in two words" in verdict.findings[0].message


def test_a_key_with_a_hyphen_is_reported_once_at_its_line(write: Write, checked: Checked) -> None:
    file = write("sft", "x-common: &common {max_length: 32}\n")
    errors = checked(config=str(file), trainer="sft", fits=False).findings
    assert [(item.key, item.line) for item in errors] == [("x-common", file.read_text().count("\n"))]


@pytest.mark.parametrize("key", ["compute_environment: LOCAL_MACHINE", "distributed_type: FSDP"])
@pytest.mark.parametrize("trainer", ["sft", None])
def test_a_file_of_accelerate_is_recognised(key: str, trainer: str | None, checked: Checked, tmp_path: Path) -> None:
    file = tmp_path / "fsdp2.yaml"
    file.write_text(f"{key}\nnum_processes: 8\ntpu_env: []\n", encoding="utf-8")
    verdict = checked(config=str(file), trainer=trainer, fits=False)
    [error] = verdict.findings
    assert verdict.outcome is Outcome.CANNOT_RUN
    assert error.message.startswith(f"{file} is a file of accelerate. Name it with accelerate_config")
