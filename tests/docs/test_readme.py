"""What the documentation lists is what the code has."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from run import commands

from autotune.cli.parser import build_parser, read_arguments
from autotune.core.result import Choosable, Contribution, Result, Trial
from autotune.core.verdict import EXIT_CODES, Finding, Need, Outcome, Remedy, Verdict, Verdicts

ROOT = Path(__file__).resolve().parents[2]
CHECK = (ROOT / "docs" / "check.md").read_text(encoding="utf-8")
RESULT = (ROOT / "docs" / "result.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["README.md", "docs/commands.md"])
def test_every_option_that_a_page_names_exists(page: str) -> None:
    options = set(re.findall(r"`(--[a-z-]+)", (ROOT / page).read_text(encoding="utf-8"))) - {"--max_steps", "--config"}
    known = build_parser().format_help()
    probe = [action for action in build_parser()._actions if action.dest != "help"]
    words = known + "".join(
        parser.format_help() for action in probe for parser in (getattr(action, "choices", None) or {}).values()
    )
    assert {option for option in options if option not in words} == set()


@pytest.mark.parametrize(
    "command", [words for words in commands(ROOT / "README.md") if words[0] == "autotune"], ids=" ".join
)
def test_every_command_of_the_readme_is_one(command: list[str]) -> None:
    read_arguments(command[1:])  # raises what is wrong with it


@pytest.mark.parametrize("kind", [Result, Choosable, Trial, Contribution])
def test_every_key_of_the_result_is_documented(kind: type) -> None:
    documented = set(re.findall(r"`([a-z_]+)`", RESULT))
    assert {field.name for field in dataclasses.fields(kind)} - documented == set()


@pytest.mark.parametrize("kind", [Verdict, Need, Finding, Remedy, Verdicts])
def test_every_key_of_a_verdict_is_documented(kind: type) -> None:
    documented = set(re.findall(r"`([a-z_]+)`", CHECK))
    assert {field.name for field in dataclasses.fields(kind)} - documented == set()


def test_every_outcome_and_exit_code_of_a_check_is_documented() -> None:
    assert {outcome.value for outcome in Outcome} <= set(re.findall(r"`([a-z ]+)`", CHECK))
    assert {int(code) for code in re.findall(r"^\| (\d) \|", CHECK, re.MULTILINE)} == set(EXIT_CODES.values())
