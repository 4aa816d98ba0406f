"""A verdict in a terminal of any width: no line is cut or too long, and copied text is unchanged."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from autotune.core.documents.estimate import MemoryEstimate
from autotune.core.documents.verdict import Finding, Fixed, Need, Outcome, Remedy, Severity, Source, Verdict, headline
from autotune.reporting.check import fixed_report, verdict_report
from autotune.reporting.document import Listing, Paragraph
from autotune.reporting.terminal import show
from autotune.units import GIB, MIB, format_bytes
from tests.cli.screen import screen

FOLDER = "configurations/of/a/team/whose/names/go/on/and/on"
DIFF = f"""\
--- {FOLDER}/{FOLDER}/{FOLDER}/mine.yaml
+++ {FOLDER}/{FOLDER}/{FOLDER}/mine.yaml
@@ -1,2 +1,2 @@
-per_device_train_batch_size: 4  # {"a comment that reaches far " * 9}
+per_device_train_batch_size: 1  # {"a comment that reaches far " * 9}
 max_length: 2048
"""
FINDINGS = (
    Finding(Severity.SILENT, "max_length=2,048 cuts 34 of 2,000 rows, " + "and so on " * 20, "max_length", "a.yaml", 4),
    Finding(Severity.SILENT, "The weights are trained in bfloat16."),
)
VERDICT = Verdict(
    Outcome.DOES_NOT_FIT,
    "does not fit: 20.56 GiB of 18.00 GiB at the worst batch, 4 rows of 2,048 tokens, traced",
    trainer="sft",
    model="a-model",
    budget_bytes=18 * GIB,
    need=Need(Source.TRACED, 21 * GIB, 19 * GIB, 23 * GIB, 4, 2048),
    findings=FINDINGS,
    remedy=Remedy({"per_device_train_batch_size": 1}, DIFF, 16 * GIB, 17 * GIB),
)


def sent(columns: int, *, colour: bool = False, name: str = "") -> str:
    file = io.StringIO()
    console = Console(file=file, width=columns, force_terminal=colour, color_system="standard" if colour else None)
    show(verdict_report(VERDICT, name), console)
    return file.getvalue()


@pytest.mark.parametrize("columns", [60, 100, 200])
def test_paragraphs_wrap_within_the_terminal_and_further_lines_stand_in(columns: int) -> None:
    lines = sent(columns).partition("\nThe smallest change")[0].splitlines()
    assert max(map(len, lines)) <= columns
    assert [line for line in lines if line.startswith("  ") and line != line.rstrip()] == []
    first = next(number for number, line in enumerate(lines) if "a.yaml:4: max_length=2,048 cuts" in line)
    last = lines.index("  The weights are trained in bfloat16.")
    assert last > first + 1
    assert all(line.startswith("    ") for line in lines[first + 1 : last])


@pytest.mark.parametrize(
    ("varied_bytes", "process_bytes", "named"),
    [
        (None, 0, "with the stated error of 10.0 %"),
        (2 * GIB, 0, "with the stated error of 10.0 % and 2.00 GiB after batches of varied lengths"),
        (None, 160 * MIB, "with the stated error of 10.0 % and 160 MiB of the process outside tensors"),
    ],
)
def test_each_part_of_the_bound_of_a_need_is_named(varied_bytes: int | None, process_bytes: int, named: str) -> None:
    memory = MemoryEstimate(20 * GIB, None, 0, {}, 0, None, 0.1, varied_bytes=varied_bytes)
    most_bytes = memory.most_bytes + process_bytes
    need = Need(Source.TRACED, 20 * GIB, 18 * GIB, most_bytes, 4, 2048, memory=memory, varied_bytes=memory.varied_bytes)
    shown = verdict_report(replace(VERDICT, need=need)).verdict
    assert shown is not None
    assert shown.evidence[-1].endswith(f" and {format_bytes(most_bytes)} {named}")


@pytest.mark.parametrize(
    ("outcome", "phase", "where"),
    [
        (Outcome.DOES_NOT_FIT, "backward", "; memory ran out in backward"),
        (Outcome.DOES_NOT_FIT, "", ""),
        (Outcome.FITS, "optimizer step", "; the peak was in optimizer step"),
    ],
)
def test_a_real_run_says_where_its_peak_was_or_where_memory_ran_out(outcome: Outcome, phase: str, where: str) -> None:
    need = Need(Source.PROBED, 20 * GIB, 20 * GIB, 20 * GIB, 4, 2048, phase)
    shown = verdict_report(replace(VERDICT, outcome=outcome, need=need)).verdict
    assert shown is not None
    assert shown.evidence[-1] == f"Measured by a real run of its worst micro-batches{where}"


@pytest.mark.parametrize("colour", [False, True])
@pytest.mark.parametrize("columns", [60, 100, 200])
def test_a_diff_keeps_its_lines(columns: int, colour: bool) -> None:
    shown = "\n".join(screen(sent(columns, colour=colour).replace("\n", "\r\n"), 10_000).lines)
    # What is not known of its speed is not left unsaid.
    diff = shown.partition("of 18.00 GiB; no speed is predicted\n")[2]
    assert [line[2:].rstrip() for line in diff.splitlines()] == [line.rstrip() for line in DIFF.splitlines()]


def test_a_search_that_found_no_change_is_no_proof_that_there_is_none() -> None:
    (section,) = (one for one in verdict_report(replace(VERDICT, remedy=None)).sections if one.title == "Remedy")
    sentence = "No change of up to three techniques was found that fits within its error and keeps training the same."
    assert section.blocks == (Paragraph(sentence),)


def test_the_time_of_a_change_is_that_of_the_micro_batches_that_were_traced() -> None:
    assert VERDICT.remedy is not None
    (section,) = (
        one
        for one in verdict_report(replace(VERDICT, remedy=replace(VERDICT.remedy, slower=1.5))).sections
        if one.title == "Remedy"
    )
    assert isinstance(section.blocks[0], Listing)
    assert section.blocks[0].lead.endswith(", and a step of the largest micro-batches takes 1.50 times as long")


def test_a_change_without_a_file_is_shown_as_yaml_has_it() -> None:
    keys = {"gradient_checkpointing": True, "optim": "adamw_torch", "padding_free": None}
    remedy = Remedy(keys, "", 16 * GIB, 17 * GIB)
    assert remedy.lines == ("gradient_checkpointing: true", "optim: adamw_torch", "no padding_free")
    (section,) = (one for one in verdict_report(replace(VERDICT, remedy=remedy)).sections if one.title == "Remedy")
    assert isinstance(section.blocks[0], Listing)
    assert section.blocks[0].lines == remedy.lines


@pytest.mark.parametrize(
    ("settings", "offered"),
    [({}, "--probe runs it for real;"), ({"gpu": "T4"}, "--probe, without --gpu on such a device, runs it for real;")],
)
def test_what_is_too_close_offers_a_run_on_the_device_itself(settings: dict[str, object], offered: str) -> None:
    shown = verdict_report(replace(VERDICT, outcome=Outcome.TOO_CLOSE, settings=settings)).verdict
    assert shown is not None
    assert shown.evidence[-1] == f"{offered} --when-unsure pass (or fail) decides without a run."


def test_what_is_too_close_for_the_host_alone_says_so() -> None:
    need = Need(Source.TRACED, 10 * GIB, 9 * GIB, 11 * GIB, 1, 2048)
    assert headline(Outcome.TOO_CLOSE, need, 18 * GIB, "") == (
        "too close to call: the host may have too little memory; on the device 10.00 GiB of 18.00 GiB"
        " (9.00 GiB to 11.00 GiB) at the worst batch, 1 row of 2,048 tokens, traced"
    )
    assert "host" not in headline(Outcome.TOO_CLOSE, need, 10 * GIB, "")


@pytest.mark.parametrize(
    ("phase", "where"),
    [
        ("micro-batch", "at the worst batch, 1 row of 2,048 tokens"),
        ("", "at the worst batch, 1 row of 2,048 tokens"),
        ("construction", "in construction"),
        ("optimizer step", "in optimizer step"),
    ],
)
def test_the_worst_batch_is_named_unless_the_peak_is_in_a_phase_without_one(phase: str, where: str) -> None:
    need = Need(Source.TRACED, 10 * GIB, 9 * GIB, 11 * GIB, 1, 2048, phase)
    assert headline(Outcome.FITS, need, 18 * GIB, "") == f"fits: 10.00 GiB of 18.00 GiB {where}, traced"


def test_a_file_that_is_read_alone_is_not_said_to_fit() -> None:
    assert headline(Outcome.READ, None, 0, "") == "reads: no error was found, and memory was not checked"


@pytest.mark.parametrize(("left", "may"), [((), "has to be"), (FINDINGS[:1], "can be")])
def test_a_file_without_keys_to_rewrite_is_not_said_to_be_written(left: tuple[Finding, ...], may: str) -> None:
    file = io.StringIO()
    show(fixed_report(Fixed("old.yaml", "", left)), Console(file=file, width=100))
    assert f"No key {may} rewritten, and no file was written. Its other keys are not checked" in file.getvalue()


def test_each_of_several_verdicts_names_its_file() -> None:
    assert sent(100, name="a.yaml").startswith("a.yaml: does not fit")


def test_what_was_rewritten_is_shown_whole() -> None:
    file = io.StringIO()
    show(fixed_report(Fixed("new.yaml", DIFF, FINDINGS[:1])), Console(file=file, width=60))
    assert f"+++ {FOLDER}/{FOLDER}/{FOLDER}/mine.yaml\n" in file.getvalue()
    assert "To do by hand:\n  a.yaml:4: max_length" in file.getvalue()
