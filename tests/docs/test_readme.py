"""What the documentation lists is what the code has."""

from __future__ import annotations

import dataclasses
import itertools
import re
from math import isclose
from pathlib import Path

import pytest
from run import commands

from autotune.cli.parser import build_parser, read_arguments
from autotune.core import dry_run
from autotune.core.bundle import PlannedBundle, ServerSplit
from autotune.core.dry_run import CommandExit, DryRun, FailedAllocation, Followed, Loader, Refused, SourceLine, Span
from autotune.core.epoch import Epoch
from autotune.core.estimate import ALIKE_MEMORY, ALIKE_SPEED, Change, Estimate, MemoryEstimate, Origin, Plan
from autotune.core.explanation import Additions, Explanation, PartPeak, PartTime, TracedPoint
from autotune.core.gpu import Gpu, GpuSpeeds
from autotune.core.rent import Offer, Rent
from autotune.core.result import Choosable, Contribution, Result, Trial
from autotune.core.verdict import EXIT_CODES, Finding, Need, Outcome, Remedy, Verdict, Verdicts

ROOT = Path(__file__).resolve().parents[2]
OF_PLANS = [Plan, Epoch, PlannedBundle, ServerSplit, Estimate, MemoryEstimate, Change, Gpu, GpuSpeeds, Rent, Offer]
EXPLAINED = [Explanation, TracedPoint, PartPeak, PartTime, Additions]
KINDS = {
    "result": [Result, Choosable, Trial, Contribution],
    "check": [Verdict, Need, Finding, Remedy, Verdicts],
    "plan": [*OF_PLANS, *EXPLAINED],
    "dry-run": [DryRun, Followed, Span, Loader, FailedAllocation, SourceLine, Refused, CommandExit],
}
DOCS = {name: (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in KINDS}


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


@pytest.mark.parametrize(
    "page", ["README.md", "docs/site/pages/api.md", "examples/python_api.py", "examples/quickstart.ipynb"]
)
def test_training_in_python_takes_all_that_was_measured(page: str) -> None:
    taken = set(re.findall(r"\bresult\.(\w+)", (ROOT / page).read_text(encoding="utf-8")))
    assert {"config", "env", "peft_config", "quantization_config", "train_dataset"} <= taken


def test_no_two_rows_of_the_recorded_plan_are_alike() -> None:
    rows = re.findall(r"^  \d +([\d.]+) GiB.*?([\d,]+)$", DOCS["plan"], re.MULTILINE)
    figures = [(float(need), float(rate.replace(",", ""))) for need, rate in rows]
    near = (ALIKE_MEMORY, ALIKE_SPEED)
    pairs = [zip(one, other, near, strict=True) for one, other in itertools.combinations(figures, 2)]
    assert len(pairs) == 3
    assert not any(all(isclose(mine, theirs, rel_tol=share) for mine, theirs, share in pair) for pair in pairs)


@pytest.mark.parametrize(("page", "kind"), [(page, kind) for page, kinds in KINDS.items() for kind in kinds])
def test_every_key_of_a_document_is_documented(page: str, kind: type) -> None:
    documented = set(re.findall(r"`([a-z_0-9]+)`", DOCS[page]))
    assert {field.name for field in dataclasses.fields(kind)} - documented == set()


def test_every_outcome_and_exit_code_of_a_check_is_documented() -> None:
    assert {outcome.value for outcome in Outcome} <= set(re.findall(r"`([a-z ]+)`", DOCS["check"]))
    assert {int(code) for code in re.findall(r"^\| (\d) \|", DOCS["check"], re.MULTILINE)} == set(EXIT_CODES.values())


def test_every_outcome_of_a_dry_run_is_documented() -> None:
    keys = DOCS["dry-run"].partition("## The document of `--json`")[2]
    assert [outcome.value for outcome in dry_run.EXIT_CODES if f"`{outcome.value}`" not in keys] == []


def test_every_origin_of_an_estimate_is_documented() -> None:
    assert all(f"`{origin}`" in DOCS["plan"] for origin in Origin)
