"""Figures on a page equal those of the code, of ``pyproject.toml`` and of recorded results."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from statistics import median

import pytest

from autotune.app import dry_run, rent
from autotune.app.arguments import DryRunArguments, ProbeArguments
from autotune.app.check.need import CPU_PROCESS_BYTES
from autotune.app.servers import UTILIZATION
from autotune.core.effort import EFFORTS
from autotune.core.machine import GPUS_PER_MACHINE
from autotune.core.step_time import HOST_BOUND_ERROR, TIME_ERROR, USUAL_PACE
from autotune.inspection.software import REQUIRED
from autotune.planning.tracing.cache import DEFAULT_LIMIT_BYTES
from autotune.planning.vllm import OVERHEAD_BYTES, SLEEPING_BYTES
from autotune.reporting import comparison
from autotune.study import explore, improvement, proposals
from autotune.study.problem import Sharing
from autotune.study.trial_documents import MAX_DEATHS
from autotune.techniques import context_parallel
from autotune.techniques.packing import PACKED_AT_ONCE
from autotune.techniques.vllm import SUPPORTED
from autotune.units import GIB, MIB
from autotune.virtual.steps.varied import SHARES

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORDS = {10: "ten"}
LEAST = {name: version.removeprefix(">=").split(",")[0] for name, version in REQUIRED.items()}


def listed(values: Iterable[object]) -> str:
    """Return values as a text has them: ``1, 2 and 3``."""
    *first, last = map(str, values)
    return f"{', '.join(first)} and {last}"


def effort_row(name: str) -> str:
    """Return the row of an effort in the table of the search."""
    effort, default = EFFORTS[name], " (default)" if name == ProbeArguments.effort else ""
    cells = (effort.patience, explore._UNPREDICTED_FACTOR * effort.patience, effort.trials)
    return f"| `{name}`{default} | {effort.planning_seconds:.0f} s | {' | '.join(map(str, cells))} |"


FIGURES = [
    ("README.md", f"Python {PROJECT['requires-python'].removeprefix('>=')}, torch {LEAST['torch']}"),
    ("README.md", f"transformers {LEAST['transformers']} and TRL {LEAST['trl']}, or newer"),
    *(("docs/probing.md", effort_row(name)) for name in EFFORTS),
    ("docs/probing.md", f"the expected improvement was below {100 * explore._MIN_IMPROVEMENT:.0f} % of the best rate"),
    ("docs/probing.md", f"(`--margin`, {100 * ProbeArguments.margin:.0f} %)"),
    ("docs/probing.md", f"TRL packs {PACKED_AT_ONCE:,} rows at a time"),
    ("docs/plan.md", f"until {improvement._PATIENCE} candidates brought none"),
    ("docs/plan.md", f"none promises {100 * improvement._MIN_IMPROVEMENT:g} %"),
    ("docs/plan.md", f"At most {improvement.MAX_TRACED} candidates are traced"),
    ("docs/plan.md", f"after steps of {listed(map(Fraction, SHARES))} of its length"),
    ("docs/plan.md", f"computed for {PACKED_AT_ONCE:,} documents"),
    ("docs/plan.md", f"±{100 * TIME_ERROR:.0f} %. With ~ it is ±{100 * HOST_BOUND_ERROR:.0f} %"),
    ("docs/plan.md", f"assumed to take {1e6 * USUAL_PACE.launch_seconds:.0f} µs per operator"),
    ("docs/plan.md", f"the limit of {DEFAULT_LIMIT_BYTES // MIB} MiB"),
    ("docs/rent.md", f"at most {rent._MAX_TRACED} candidates are traced"),
    ("docs/rent.md", f"tries {listed(rent.NUMBERS)} GPUs"),
    ("docs/rent.md", f"rises by over {100 * rent._WORTH:.0f} %"),
    ("docs/plan.md", f"(default: one for every {GPUS_PER_MACHINE})"),
    ("docs/check.md", f"{CPU_PROCESS_BYTES // MIB} MiB are added"),
    ("docs/dry-run.md", f"at most {dry_run._MAX_GPUS}, and"),
    ("docs/dry-run.md", f"(`--steps`, default {DryRunArguments.steps})"),
    ("docs/devices.md", f"with rows of {context_parallel._LONG_ROW:,} tokens or more"),
    ("docs/devices.md", f"with more than {GPUS_PER_MACHINE} processes"),
    ("docs/searching-together.md", f"A candidate that loses {MAX_DEATHS} workers is vetoed"),
    ("docs/searching-together.md", f"retried for {Sharing().patience_seconds / 60:.0f} minutes"),
    ("docs/vllm.md", f"probes need {SUPPORTED}"),
    ("docs/vllm.md", f"A server takes {UTILIZATION} of each"),
    ("docs/vllm.md", f"CUDA graphs together take {OVERHEAD_BYTES // GIB} GiB"),
    ("docs/vllm.md", f"Asleep, vLLM holds {SLEEPING_BYTES // GIB} GiB"),
    ("docs/result.md", f"({proposals._MAX_EXAMINED:,} of more combinations)"),
    ("docs/result.md", f"more than {WORDS[int(comparison._UNKNOWN)]} times the speed-up"),
]


@pytest.mark.parametrize(("page", "text"), FIGURES)
def test_a_figure_is_that_of_the_code(page: str, text: str) -> None:
    assert text in " ".join((ROOT / page).read_text(encoding="utf-8").split())


def test_the_readme_names_every_extra_for_users() -> None:
    install = (ROOT / "README.md").read_text(encoding="utf-8").split("## Install", 1)[1].split("\n## ", 1)[0]
    named = set(re.findall(r"`(\w+)`", install))
    assert PROJECT["optional-dependencies"].keys() - {"dev", "docs"} <= named


def test_the_figures_of_several_gpus_are_those_of_the_rows() -> None:
    """Rows are those of FSDP2 with reserved memory, and those with a time of a step on more than one GPU."""
    page = (ROOT / "benchmarks" / "published" / "ranks.md").read_text(encoding="utf-8")
    parts = {part.partition("\n")[0]: part for part in page.split("\n## ")[1:]}
    percent = r"([+-][\d.]+)%"
    # The last error of a row.
    reserved = [
        -float(error)
        for title, part in parts.items()
        if "FSDP2" in title
        for error in re.findall(rf"^\| .*GB \| {percent} \|", part, re.MULTILINE)
    ]
    seconds = [
        float(error)
        for name, error in re.findall(rf"^\| (.*?) \|.* s \| {percent} \|", page, re.MULTILINE)
        if "1 GPU" not in name
    ]
    accuracy = " ".join((ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8").split())
    assert len(reserved) == 4
    assert f"FSDP2 is {min(reserved):.0f} to {max(reserved):.0f} % too low" in accuracy
    assert len(seconds) == 9
    assert f"half are within {median(map(abs, seconds)):.0f} %" in accuracy
    assert f"{-min(seconds):.0f} % too short to {max(seconds):.0f} % too long" in accuracy


def test_the_figures_of_trained_recommendations_are_those_of_their_page() -> None:
    page = (ROOT / "benchmarks" / "probe" / "soak.md").read_text(encoding="utf-8")
    percent = r"\+(\d+)% in the"
    (within,), (rates,), (peaks,), (again,) = (
        re.findall(pattern, page)
        for pattern in (
            r"(\d+) of these within the budget",
            r"(\d+ of \d+ rates) are within the promised range",
            rf"{percent} median",
            rf"{percent} first",
        )
    )
    text = " ".join((ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8").split())
    for figure in (
        f"{within} stayed within the budget",
        f"{rates} were in the promised range",
        f"Peaks were {peaks} % above",
        f"keep freed memory, {again} %",
    ):
        assert figure in text


def test_the_figures_of_measured_spaces_are_those_of_their_page() -> None:
    page = " ".join((ROOT / "benchmarks" / "replay" / "planned_search.md").read_text(encoding="utf-8").split())
    accuracy = " ".join((ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8").split())
    rows = re.findall(
        r"\| `\w+\.json\.gz` \| [^|]+ \| (\d+) \| [^|]*\| [^|]*\| [^|]*\| [^|]*\| ([\d.]+), ([\d.]+) % \|", page
    )
    sizes, correlations, errors = zip(*rows, strict=True)
    (with_them, without), *_ = re.findall(
        r"To within 2 % of the best.*?: (\d+) probes with predictions and (\d+)", page
    )
    assert f"a rank correlation of {listed(correlations)} with the measured ones" in accuracy
    assert f"a median error of {listed(f'{error} %' for error in errors)} after one probe" in accuracy
    kinds = ("SFT", "SFT with LoRA", "SFT with short rows", "DPO")
    assert all(f"{size} of {kind}" in accuracy for size, kind in zip(sizes, kinds, strict=True))
    assert f"after {with_them} probes in the median, and after {without} without predictions" in accuracy


def test_the_figures_of_published_speeds_are_those_of_their_page() -> None:
    page = " ".join((ROOT / "benchmarks" / "published" / "speeds.md").read_text(encoding="utf-8").split())
    accuracy = " ".join((ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8").split())
    within = r"are \d+ of (\d+) rows: (\d+) of (\d+) within ±25%, and (\d+) of (\d+) within ±50%"
    total, near, others, slow, bound = re.findall(within, page)[0]
    pairs, right = re.findall(r"Of (\d+) pairs .*?, (\d+) are predicted in the right order", page)[0]
    over_tables, last = (
        re.findall(rf"{name}.*?\| ([\d.]+)%, ([\d.]+)%, [+-][\d.]+% \| [\d. ]*\|", page)[0]
        for name in (r"\*\*median over tables\*\*", "llm-foundry MPT H100-80")
    )
    assert slow == bound
    assert f"Of {total} that six publishers measured, predicted times are {over_tables[0]} % off" in accuracy
    assert f"{near} of {others} are within 25 %, and within 50 % all {bound} that" in accuracy
    assert f"Of {pairs} pairs of GPUs, {right} are in the right order" in accuracy
    assert f"{last[0]} % off in the median, {last[1]} % in the 90th percentile" in accuracy
