"""Words of the command line become arguments of the API, or one error message."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import autotune
from autotune.app.arguments import names
from autotune.cli.arguments import fixes, options_of
from autotune.cli.parser import build_parser, read_arguments
from autotune.errors import InputError
from autotune.techniques import catalogue
from autotune.trainers import DEFAULT, trainers


def options(*words: str) -> dict[str, Any]:
    """Return what the API would be given."""
    return vars(read_arguments(words).arguments)


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the help of a command."""
    with pytest.raises(SystemExit) as ended:
        read_arguments([command, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_only_what_is_given_reaches_the_api_so_that_defaults_live_there() -> None:
    assert options("probe", "MODEL", "DATA") == {"model": "MODEL", "dataset": "DATA"}


def test_every_option_of_the_issue_is_understood() -> None:
    words = (
        "probe M D --trainer sft --device cpu --memory-budget 24GiB --margin 0.1 --global-batch-size 64 "
        "--max-length 2048 --allow lora,quantization --fix packing=bfd --exclude liger --space s.yaml --effort quick "
        "--trials 5 --timeout 10m --init pretrained --seed 1 --storage sqlite:///x.db --study s --resume --output out "
        "--no-plan --json --debug"
    )
    assert options(*words.split()) == {
        "model": "M",
        "dataset": "D",
        "trainer": "sft",
        "device": "cpu",
        "memory_budget": "24GiB",
        "margin": 0.1,
        "global_batch_size": 64,
        "max_length": 2048,
        "allow": ["lora", "quantization"],
        "fix": ["packing=bfd"],
        "exclude": ["liger"],
        "space": "s.yaml",
        "effort": "quick",
        "trials": 5,
        "timeout": "10m",
        "init": "pretrained",
        "seed": 1,
        "storage": "sqlite:///x.db",
        "study": "s",
        "resume": True,
        "output": "out",
        "plan": False,
        "json": True,
    }


@pytest.mark.parametrize(
    ("command", "function"),
    [
        ("probe", "probe"),
        ("plan", "plan rent"),
        ("lengths", "lengths"),
        ("techniques", "catalogue"),
        ("dry-run", "dry_run"),
    ],
)
def test_options_are_parameters_of_the_api(command: str, function: str) -> None:
    subparsers = next(action for action in build_parser()._actions if action.dest == "==SUPPRESS==" and action.choices)
    assert isinstance(subparsers.choices, dict)
    taken = {action.dest for action in subparsers.choices[command]._actions} - {"help", "json", "all", "html", "debug"}
    parameters = {name for each in function.split() for name in inspect.signature(getattr(autotune, each)).parameters}
    assert taken == parameters - {"listener"}


@pytest.mark.parametrize("command", ["probe", "plan", "lengths", "techniques"])
def test_every_command_says_which_trainers_there_are_and_which_is_taken(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = " ".join(help_of(command, capsys).split())
    assert f"--trainer NAME TRL's trainer (default: {DEFAULT}" in shown
    assert f"--trainer takes: {', '.join(trainers())}" in shown


@pytest.mark.parametrize("words", ["probe M D", "plan M D", "lengths M D", "techniques"])
def test_every_command_that_reads_data_takes_a_trainer(words: str) -> None:
    assert options(*words.split(), "--trainer", "dpo")["trainer"] == "dpo"


def test_the_words_of_a_command_stay_the_command_s() -> None:
    words = "dry-run --gpu 24GiB --as-shuffled -- python train.py --steps 7 -- --gpu"
    assert options(*words.split()) == {
        "gpu": "24GiB",
        "as_shuffled": True,
        "command": ["python", "train.py", "--steps", "7", "--", "--gpu"],
    }


def test_knobs_and_choices_become_what_the_api_takes() -> None:
    words = "plan M D --allow lora,packing --allow optimizer --fix packing=bfd --exclude liger --json"
    assert options_of(read_arguments(words.split()).arguments) == (
        {
            "model": "M",
            "dataset": "D",
            "allow": ["lora", "packing", "optimizer"],
            "fix": {"packing": "bfd"},
            "exclude": ["liger"],
        },
        True,
    )
    assert options_of(read_arguments(["plan", "M", "D"]).arguments) == ({"model": "M", "dataset": "D"}, False)


def test_help_lists_the_knobs_of_the_catalogue(capsys: pytest.CaptureFixture[str]) -> None:
    shown = " ".join(help_of("probe", capsys).split())
    assert all(technique.name in shown for technique in catalogue())


def test_help_lists_every_knob_that_some_trainer_has_to_be_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    listed = help_of("probe", capsys).partition("--allow takes")[2].partition("--effort takes")[0]
    assert {"global_batch", "lora", "max_length", "per_device_train_batch_size"} <= set(re.findall(r"\w+", listed))


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (
            "probe",
            "--no-plan do not trace candidates before the first probe to predict memory and speed",
        ),
        ("check", "--no-fit do not check memory: the configuration is only read"),
        (
            "probe",
            "--eval-dataset DATASET rows for evaluation during training",
        ),
        ("plan", "or directory: .jsonl, .json, .csv, .parquet, .arrow or .txt (default: rows of --seq-len tokens)"),
        ("probe", "--seed N seed of the search and of the order of batches (default: 42)"),
        (
            "probe",
            "--timeout TIME time until the result so far is written, such as 10m or in seconds (default:",
        ),
        ("dry-run", "COMMAND the training command, as words or as one text; on the command line after --"),
    ],
)
def test_help_describes_an_argument_with_its_default(
    command: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shown in " ".join(help_of(command, capsys).split())


@pytest.mark.parametrize("command", ["probe", "plan", "lengths", "techniques", "dry-run"])
def test_help_fits_a_terminal_and_gives_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = help_of(command, capsys)
    assert f"autotune {command}" in shown.partition("example")[2]
    assert max(map(len, shown.splitlines())) <= 120


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "The following arguments are required: COMMAND"),
        ("prob M D", "'prob' is not a command. Did you mean 'probe'? Choose from probe, plan, check,"),
        ("lengths M", "required: DATASET"),
        ("probe M D --trails 3", "'--trails' is not an option of autotune probe. Did you mean '--trials'?"),
        ("probe M D --trails=3", "Did you mean '--trials'?"),
        ("plan M --base c.yaml", "'--base' is not an option of autotune plan. It is an option of `autotune probe`."),
        ("probe M D extra", "'extra' is one argument too many for autotune probe"),
        ("probe M D --trials many", "invalid int value: 'many'"),
        ("probe M D --device tpu", "'tpu' is not a value of --device. Did you mean 'cpu'?"),
        ("probe M D --effort QUICK", "'QUICK' is not a value of --effort. Did you mean 'quick'?"),
        ("probe M D --dev cpu", "'--dev' is not an option"),
    ],
)
def test_a_wrong_word_is_told_with_where_to_look(words: str, message: str) -> None:
    with pytest.raises(InputError) as raised:
        read_arguments(words.split())
    assert message in str(raised.value)
    assert "--help" in raised.value.hint


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("probe M D --memory-budget 24 GiB", "Write --memory-budget 24GiB."),
        ("probe --memory-budget 24 gb --base c.yaml", "Write --memory-budget 24gb."),
        ("plan M --seq-len 8 --gpu=24 GiB", "Write --gpu 24GiB."),
        ("probe M D --timeout 10 min --json", "Write --timeout 10min."),
    ],
)
def test_a_space_before_a_unit_is_told(words: str, hint: str) -> None:
    with pytest.raises(InputError, match="There is a space between") as raised:
        read_arguments(words.split())
    assert raised.value.hint == hint


def test_a_model_or_a_command_may_be_named_like_a_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()
    assert options("probe", "--trials", "5", "m", "d.jsonl")["model"] == "m"
    assert options("dry-run", "--", "train", "--hours", "5", "h")["command"][-1] == "h"


def test_names_come_in_lists_and_repeatedly() -> None:
    assert names(["lora, quantization", "optimizer", ""]) == ("lora", "quantization", "optimizer")


def test_fixes_are_choices_by_knob() -> None:
    assert fixes(["packing=bfd", "max_length = 64", "lora=r16", "packing=bfd"]) == {
        "packing": "bfd",
        "max_length": "64",
        "lora": "r16",
    }


@pytest.mark.parametrize("text", ["packing", "packing=", "=bfd", ""])
def test_a_fix_without_knob_or_choice_is_told(text: str) -> None:
    with pytest.raises(InputError, match="does not name a knob and a choice"):
        fixes([text])


def test_fixes_that_contradict_each_other_are_told() -> None:
    with pytest.raises(InputError, match="--fix packing=none contradicts --fix packing=bfd"):
        fixes(["packing=bfd", "packing=none"])
