"""User-defined reward functions are imported only on request, and only in a separate process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import autotune
from autotune.core.configuration import Configuration, ReadCommand
from autotune.core.documents.verdict import Outcome, Severity
from autotune.errors import InputError
from autotune.inspection.command_line import Command
from autotune.inspection.script import Script
from autotune.trainers.prompts import NO_REWARD
from autotune.userconfig.sources import rewards_of
from autotune.userconfig.written import WrittenConfig
from tests.app.check.conftest import Checked, Write, cache_of
from tests.small import write_rows

GPU = "H100-80GB"
OWN = "get_soft_overlong_punishment"
TRAP = """\
import os
with open("ran", "a") as file:
    file.write(f"{os.getpid()}\\n")
def reward(completions, solution, **_):
    return [0.0] * len(completions)
"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def started(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Start the command line in a directory with a module that leaves a file when it is imported."""
    (tmp_path / "trap.py").write_text(TRAP, encoding="utf-8")
    cache = str(cache_of(tmp_path_factory))
    source = str(Path(autotune.__file__).parent.parent)

    def run(*words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "autotune", "check", *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": source, "XDG_CACHE_HOME": cache, "COLUMNS": "200"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return run


def named(file: Path, *names: str) -> str:
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace(f"[{OWN}]", f"[{', '.join(names)}]"), encoding="utf-8")
    return str(file)


def test_what_a_file_names_is_not_imported_and_what_it_trusts_is_not_followed(write: Write, checked: Checked) -> None:
    # Whatever imports it fails, as the check with --import does below.
    file = named(write("grpo", "trust_remote_code: true\n"), "no_such_module.reward")
    verdict = checked(config=file, trainer="grpo", gpu=GPU)
    assert verdict.outcome is Outcome.FITS, verdict.headline
    left = next(item for item in verdict.findings if item.message.startswith("Not imported (--import does): no_such_"))
    assert left.line == 10
    assert any("trust_remote_code lets the model's own code run" in item.message for item in verdict.findings)


@pytest.mark.nightly
def test_no_process_of_the_command_imports_it(write: Write, started: Start, tmp_path: Path) -> None:
    file = named(write("grpo", ""), "trap.reward")
    process = started(file, "--trainer", "grpo", "--gpu", GPU)
    told, wrong = process.communicate()
    assert process.returncode == 0, wrong
    assert not (tmp_path / "ran").exists()
    assert f"{file}:10: Not imported (--import does): trap.reward." in told


@pytest.mark.nightly
def test_it_is_imported_where_that_is_asked_for_and_not_by_the_process_that_was_started(
    write: Write, started: Start, tmp_path: Path
) -> None:
    file = named(write("grpo", ""), "trap.reward")
    process = started("--import", "--gpu", GPU, "--", "trl", "grpo", "--config", file)
    told, wrong = process.communicate()
    assert process.returncode == 0, wrong
    importing = (tmp_path / "ran").read_text(encoding="utf-8").split()
    assert importing
    assert str(process.pid) not in importing
    assert "Imported and not run: trap.reward." in told


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_such_module.reward", "The module of reward_funcs' no_such_module.reward cannot be imported"),
        ("json.no_such_function", "json has no function no_such_function, which reward_funcs names"),
    ],
)
def test_what_cannot_be_imported_is_told_with_its_line(write: Write, checked: Checked, name: str, said: str) -> None:
    verdict = checked(config=named(write("rloo", ""), name), trainer="rloo", gpu=GPU, imports=True)
    found = next(item for item in verdict.findings if said in item.message)
    assert (verdict.outcome, found.line) == (Outcome.CANNOT_RUN, 10)


def test_a_name_that_is_no_path_has_to_be_one_of_trl(write: Write, checked: Checked) -> None:
    verdict = checked(config=named(write("grpo", ""), "accuracy"), trainer="grpo", gpu=GPU)
    found = next(item for item in verdict.findings if "There is no reward function 'accuracy'" in item.message)
    assert (verdict.outcome, found.line) == (Outcome.CANNOT_RUN, 10)


def test_all_names_that_trl_lacks_are_told_at_once_from_the_file_alone(write: Write, checked: Checked) -> None:
    file = named(write("grpo", ""), "code", "format", "accuracy_reward", "my.own")
    verdict = checked(config=file, trainer="grpo", fits=False)
    (found,) = (item for item in verdict.findings if item.severity is Severity.ERROR)
    assert (verdict.outcome, verdict.exit_code, found.line) == (Outcome.CANNOT_RUN, 2, 10)
    assert found.message.startswith("There is no reward function 'code' or 'format' (reward_funcs). Give a dotted path")
    assert "one of accuracy_reward, " in found.message
    # An option of the command takes one name, or several.
    words = ("--config", named(write("grpo", ""), "my.own"), "--reward_funcs", "format")
    assert checked(command=("trl", "grpo", *words), fits=False).outcome is Outcome.CANNOT_RUN


def test_a_script_may_have_names_of_its_own(write: Write, checked: Checked, script: str) -> None:
    Path(script).write_text("from trl import GRPOConfig, GRPOTrainer, TrlParser\n", encoding="utf-8")
    words = ("python", script, "--config", named(write("grpo", ""), "code", "format"))
    assert checked(command=words, fits=False).outcome is Outcome.READ


def test_trl_counts_weights_against_functions(write: Write, checked: Checked) -> None:
    file = named(write("grpo", "reward_weights: [1, 2]\n"), "my.own", OWN, "my.other")
    verdict = checked(config=file, trainer="grpo", gpu=GPU)
    assert verdict.outcome is Outcome.CANNOT_RUN
    assert any("reward weights (2) must match" in item.message for item in verdict.findings)


def read(**script: object) -> ReadCommand:
    return ReadCommand({"GRPOScriptArguments": Configuration("GRPOScriptArguments", script, {})})


def config(**values: object) -> Configuration:
    return Configuration("GRPOConfig", values, {})


def test_one_of_trl_s_stands_in_for_each_that_is_not_imported() -> None:
    names = ["accuracy_reward", "my.reward"]
    left = rewards_of(read(reward_funcs=names), config(), imports=False)
    assert (left.built, left.own) == (("accuracy_reward", NO_REWARD), ("my.reward",))
    taken = rewards_of(read(reward_funcs=names), config(), imports=True)
    assert taken.built == ("accuracy_reward", "my.reward")
    assert taken.sentence(probed=True) == "Imported and run: my.reward."


def test_where_none_is_named_there_are_as_many_as_weights() -> None:
    assert rewards_of(read(), config(reward_weights=[1.0, 2.0]), imports=False).built == (NO_REWARD,) * 2
    assert rewards_of(ReadCommand(), config(reward_weights=None), imports=True).sentence(probed=False) == ""


def test_trl_s_own_command_needs_a_reward_function_and_a_script_may_have_its_own() -> None:
    with pytest.raises(InputError, match=r"reward_funcs names no reward function, and `trl grpo` needs one"):
        rewards_of(read(), config(), by_command="trl grpo", imports=False)
    assert rewards_of(read(), config(), imports=False).built == (NO_REWARD,)


def test_a_file_without_reward_functions_is_of_trl_s_own_command() -> None:
    own = Command("grpo", ("--config", "x"))
    script = replace(own, source=Script("train.py", frozenset(), "grpo", "", takes_more=False))
    assert WrittenConfig(own, None, "grpo").own_command == "trl grpo"
    assert (
        WrittenConfig(script, None, "grpo").own_command
        == WrittenConfig(Command("grpo", ()), None, "grpo").own_command
        == ""
    )
    # TRL has no command for it.
    assert WrittenConfig(own, None, "online_dpo").own_command == ""


def test_a_function_of_trl_s_that_reads_a_column_that_is_not_there_cannot_run(
    write: Write, checked: Checked, tmp_path: Path
) -> None:
    rows = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "memory is", "answer": "one"}] * 8)
    file = named(write("grpo", ""), "accuracy_reward")
    verdict = checked(config=file, trainer="grpo", gpu=GPU, dataset=str(rows))
    found = next(item for item in verdict.findings if "accuracy_reward" in item.message)
    assert (verdict.outcome, found.line) == (Outcome.CANNOT_RUN, 10)
    assert "needs solution, and TRL has no column of that name" in found.message
