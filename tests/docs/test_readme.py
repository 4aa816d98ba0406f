"""The documentation lists the options, choices, keys and exit codes of the code."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
from math import isclose
from pathlib import Path

import pytest
from run import commands

import autotune
from autotune.cli.parser import build_parser, read_arguments
from autotune.core.documents import dry_run
from autotune.core.documents.bundle import PlannedBundle, ServerSplit
from autotune.core.documents.dry_run import (
    CommandExit,
    DryRun,
    FailedAllocation,
    Loader,
    ProcessRecord,
    SourceLine,
    StepMemory,
    UnsupportedCall,
)
from autotune.core.documents.estimate import (
    ALIKE_MEMORY,
    ALIKE_SPEED,
    Change,
    Counts,
    Estimate,
    MemoryEstimate,
    Origin,
    Plan,
)
from autotune.core.documents.explanation import Explanation, PartPeak, PartTime, TracedPoint
from autotune.core.documents.length_report import LengthLimit
from autotune.core.documents.memory_timeline import Mark, MemoryTimeline
from autotune.core.documents.rent import Offer, Rent
from autotune.core.documents.result import (
    BaseFile,
    Contribution,
    LaterFailure,
    MeasuredCandidate,
    Result,
    Smallest,
    Trial,
)
from autotune.core.documents.verdict import EXIT_CODES, Finding, Need, Outcome, Remedy, Verdict, Verdicts
from autotune.core.gpu import Gpu, GpuSpeeds
from autotune.core.rows.epoch import Epoch
from autotune.core.setting import GLOBAL_BATCH
from autotune.techniques import catalogue
from tests.docs.pages import ROOT, code, pages, python_of

SECTIONS: Mapping[tuple[str, str], Sequence[type]] = {
    ("result", ""): [Result, Smallest, BaseFile],
    ("result", "recommended-and-baseline"): [MeasuredCandidate],
    ("result", "timeline"): [MemoryTimeline, Mark],
    ("result", "trials"): [Trial, LaterFailure],
    ("result", "contributions"): [Contribution],
    ("documents", "plan"): [Plan, Change, Counts, LengthLimit],
    ("documents", "rent"): [Rent],
    ("documents", "offer"): [Offer],
    ("documents", "bundle"): [PlannedBundle, ServerSplit],
    ("documents", "estimate"): [Estimate],
    ("documents", "epoch"): [Epoch],
    ("documents", "memory"): [MemoryEstimate],
    ("documents", "gpu"): [Gpu, GpuSpeeds],
    ("documents", "explanation"): [Explanation, TracedPoint, PartPeak, PartTime],
    ("documents", "check"): [Verdict, Need, Finding, Remedy, Verdicts],
    ("documents", "dry-run"): [
        DryRun,
        ProcessRecord,
        StepMemory,
        Loader,
        FailedAllocation,
        SourceLine,
        UnsupportedCall,
        CommandExit,
    ],
}
"""By page and anchor of the heading, the documents whose keys the section lists."""
PAGES = {"plan", "check", *(page for page, _ in SECTIONS)}
DOCS = {page: (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8") for page in PAGES}


def section(page: str, anchor: str) -> str:
    """Return the text below a heading of a page, up to the next heading of that depth; the first without an anchor."""
    parts = re.split(r"^## (.*)\n", DOCS[page], flags=re.MULTILINE)
    titles = (re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in parts[1::2])
    return dict(zip(titles, parts[2::2], strict=True))[anchor] if anchor else parts[0]


GUIDE = [page for page in pages() if page.parent in (ROOT, ROOT / "docs")]
KNOBS = {technique.name: technique for technique in catalogue()}
(PARSERS,) = (action.choices for action in build_parser()._actions if isinstance(action.choices, dict))
# Options of SLURM, DeepSpeed and torchrun; those of TRL and accelerate have underscores.
OTHERS = {"--gpus", "--hostfile", "--nnodes"}


@pytest.mark.parametrize("page", GUIDE, ids=lambda page: page.name)
def test_every_option_that_a_page_names_exists(page: Path) -> None:
    options = {name: set(parser._option_string_actions) for name, parser in PARSERS.items()}
    unknown = []
    for words in (text.split(" -- ")[0].split() for text in code(page)):
        command = words[1] if words[0] == "autotune" and len(words) > 1 else ""
        if command in options or words[0].startswith("--"):
            known = options.get(command) or OTHERS.union(*options.values())
            named = {word.partition("=")[0] for word in words if re.match(r"--[a-z]", word) and "_" not in word}
            unknown += sorted(named - known)
    assert unknown == []


@pytest.mark.parametrize("page", GUIDE, ids=lambda page: page.name)
def test_every_choice_that_a_page_names_is_one(page: Path) -> None:
    texts = [*code(page), *map(" ".join, commands(page))]
    fixed = re.findall(r"--fix ([a-z]\w*)=(\S+)", "\n".join(texts))
    fixed += [(found[1], found[2]) for text in texts if (found := re.fullmatch(r"(\w+)=(\S+)", text))]
    for knob, choice in fixed:
        if knob in KNOBS and knob != "peft_config":  # which takes a file
            KNOBS[knob].parse(choice)  # raises an error
    named = re.findall(r"--(?:allow|exclude) ([a-z][\w,]*)", "\n".join(texts))
    named += re.findall(r"--fix ([a-z]\w*)=", "\n".join(texts))
    assert {knob for names in named for knob in names.split(",")} <= {*KNOBS, GLOBAL_BATCH}


@pytest.mark.parametrize(
    "command",
    [words for page in pages() for words in commands(page) if words[0] == "autotune"],
    ids=" ".join,
)
def test_every_command_of_a_page_is_one(command: list[str]) -> None:
    read_arguments([word for word in command[1:] if word != "…"])  # raises an error


@pytest.mark.parametrize("command", ["", *PARSERS])
def test_every_example_of_a_help_is_a_command(command: str) -> None:
    shown = (PARSERS[command] if command else build_parser()).format_help()
    examples = re.findall(r"^  autotune (.+?)(?: && .*)?$", shown, re.MULTILINE)
    assert examples
    for example in examples:
        read_arguments(shlex.split(example))  # raises an error


@pytest.mark.parametrize("page", [page for page in pages() if python_of(page)], ids=lambda page: page.name)
def test_every_call_in_python_has_arguments_that_exist(page: Path) -> None:
    for node in (node for text in python_of(page) for node in ast.walk(ast.parse(text))):
        if isinstance(node, ast.Call) and (found := re.fullmatch(r"autotune\.(\w+)", ast.unparse(node.func))):
            named = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg is not None}
            inspect.signature(getattr(autotune, found[1])).bind_partial(*node.args, **named)


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


@pytest.mark.parametrize(("place", "kind"), [(place, kind) for place, kinds in SECTIONS.items() for kind in kinds])
def test_every_key_of_a_document_is_documented(place: tuple[str, str], kind: type) -> None:
    documented = set(re.findall(r"`([a-z_0-9]+)`", section(*place)))
    assert {field.name for field in dataclasses.fields(kind)} - documented == set()


@pytest.mark.parametrize("place", SECTIONS, ids="#".join)
def test_every_key_that_a_section_lists_is_of_its_documents(place: tuple[str, str]) -> None:
    known = {field.name for kind in SECTIONS[place] for field in dataclasses.fields(kind)}
    cells = re.findall(r"^\| ((?:`[\w.\[\]]+`(?:, )?)+) \|", section(*place), re.MULTILINE)
    assert {name.rpartition(".")[2] for cell in cells for name in re.findall(r"`([^`]+)`", cell)} <= known


def test_every_outcome_and_exit_code_of_a_check_is_documented() -> None:
    assert {outcome.value for outcome in Outcome} <= set(re.findall(r"`([a-z ]+)`", section("documents", "check")))
    assert {int(code) for code in re.findall(r"^\| (\d) \|", DOCS["check"], re.MULTILINE)} == set(EXIT_CODES.values())


def test_every_outcome_of_a_dry_run_is_documented() -> None:
    keys = section("documents", "dry-run")
    assert [outcome.value for outcome in dry_run.EXIT_CODES if f"`{outcome.value}`" not in keys] == []


def test_every_origin_of_an_estimate_is_documented() -> None:
    assert all(f"`{origin}`" in section("documents", "estimate") for origin in Origin)
