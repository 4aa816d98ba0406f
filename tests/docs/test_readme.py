"""What the documentation lists is what the code has."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from autotune.cli.parser import build_parser
from autotune.core.result import Choosable, Contribution, Result, Trial
from autotune.core.verdict import EXIT_CODES, Finding, Need, Outcome, Remedy, Verdict, Verdicts
from autotune.techniques import catalogue

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CHECK = (ROOT / "docs" / "check.md").read_text(encoding="utf-8")
RESULT = (ROOT / "docs" / "result.md").read_text(encoding="utf-8")


def test_the_readme_names_every_knob() -> None:
    table = README.partition("## Knobs")[2].partition("## Limits")[0]
    assert {technique.name for technique in catalogue()} == set(re.findall(r"`([a-z0-9_]+)`", table))


def test_every_option_that_the_readme_names_exists() -> None:
    options = set(re.findall(r"`(--[a-z-]+)", README)) - {"--max_steps", "--config"}
    known = build_parser().format_help()
    probe = [action for action in build_parser()._actions if action.dest != "help"]
    words = known + "".join(
        parser.format_help() for action in probe for parser in (getattr(action, "choices", None) or {}).values()
    )
    assert {option for option in options if option not in words} == set()


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
