"""The progress of a run: as plain lines, and live in a terminal."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from autotune.core.candidate import Candidate
from autotune.core.events import (
    CandidateVetoed,
    Event,
    Noted,
    ProbeFinished,
    ProbeStarted,
    Ranked,
    StageStarted,
    StudyResumed,
    Tracing,
    WorkloadReady,
)
from autotune.core.machine import Hardware
from autotune.core.measurement import Measurement, OutOfMemory
from autotune.core.program import BACKWARD
from autotune.core.rows.documents import Documents
from autotune.core.rows.lengths import LengthDistribution
from autotune.core.status import ProbeStatus
from autotune.reporting.progress import PlainListener, Progress
from autotune.reporting.watch import Display, watching
from autotune.reporting.words import differences
from autotune.units import GIB
from tests.reporting.examples import BASELINE, WINNER, a_workload
from tests.reporting.plans import DEFAULT, FASTEST, LONGEST, an_estimate

PACKED = BASELINE.but(packing="bfd")
RAN = Measurement(
    ProbeStatus.OK, peak_bytes=10 * GIB, device_bytes=12 * GIB, tokens_per_second=10_000.0, wall_seconds=10.0
)
RAN_OUT = Measurement(ProbeStatus.OUT_OF_MEMORY, wall_seconds=4.0, out_of_memory=OutOfMemory(BACKWARD, GIB, None, None))
H100 = Hardware("cuda", "NVIDIA H100", 80 * GIB)
READY = WorkloadReady(a_workload(), H100, 24 * GIB, 1234, BASELINE)
EVENTS: tuple[Event, ...] = (
    StageStarted("Tokenising chats.jsonl"),
    READY,
    Noted("The driver is [old]."),
    ProbeStarted(0, BASELINE, "baseline", 16),
    ProbeFinished(0, BASELINE, "baseline", RAN, best=True),
    CandidateVetoed(1, WINNER, "it is illegal"),
    ProbeStarted(2, PACKED, "search", 16),
    ProbeFinished(2, PACKED, "search", RAN_OUT, best=False),
)


def plain(*events: Event) -> list[str]:
    """Return the lines that report the events."""
    lines: list[str] = []
    listener = PlainListener(lines.append)
    for event in events:
        listener(event)
    return lines


def sent(*events: Event, width: int = 100, term: str = "xterm") -> str:
    """Return what a terminal has been sent."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=width, highlight=False, _environ={"TERM": term})
    with watching(console) as listener:
        for event in events:
            listener(event)
    return file.getvalue()


def live(*events: Event, width: int = 100) -> str:
    """Return the same without its control sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", sent(*events, width=width))


def followed(*events: Event) -> Progress:
    """Return the progress after the events."""
    progress = Progress()
    for event in events:
        progress.follow(event)
    return progress


def test_every_event_is_one_plain_line() -> None:
    assert plain(*EVENTS) == [
        "Tokenising chats.jsonl",
        (
            "Qwen2ForCausalLM (494M parameters) on 700 rows, 196,080 tokens, the longest 2,900; budget 24.00 GiB on "
            "NVIDIA H100, 1,234 candidates"
        ),
        "note: The driver is [old].",
        "probe 0 started (1 of at most 16): TRL's default",
        "probe 0 ok: 12.00 GiB, 10,000 tok/s: TRL's default (best so far)",
        (
            "candidate 1 vetoed: it is illegal: gradient_checkpointing=off lora=r16 max_length=2048 packing=bfd "
            "per_device_train_batch_size=4"
        ),
        "probe 2 started (2 of at most 16): packing=bfd",
        "probe 2 out of memory: in backward, asking for 1.00 GiB: packing=bfd",
    ]


def test_rows_are_announced_with_the_tokens_of_all_their_sequences() -> None:
    pairs = Documents.of_groups([(90, 101, 150, 180), (10, 101, 300, 120)])
    dataset = replace(a_workload().dataset, several=pairs, lengths=LengthDistribution({180: 90, 300: 10}))
    (line,) = plain(WorkloadReady(a_workload(trainer="dpo", dataset=dataset), H100, 24 * GIB, 2, BASELINE))
    assert "on 100 rows, 33,900 tokens, the longest 300; budget" in line


@pytest.mark.parametrize(
    ("hardware", "text"),
    [
        (Hardware("cpu", "AMD EPYC", GIB), "on a CPU (AMD EPYC)"),
        (replace(H100, processes=4), "for each of 4 processes on NVIDIA H100"),
    ],
)
def test_the_device_is_named_before_the_first_probe(hardware: Hardware, text: str) -> None:
    (line,) = plain(replace(READY, hardware=hardware))
    assert line.endswith(f"budget 24.00 GiB {text}, 1,234 candidates")


def test_a_reason_of_several_lines_stays_one_plain_line() -> None:
    crashed = Measurement(ProbeStatus.CRASHED, reason="Traceback\nValueError")
    assert plain(ProbeFinished(0, PACKED, "search", crashed, best=False))[0].count("\n") == 0


ESCAPES = "\x1b[2Jgone\x07"


def test_what_comes_from_outside_reaches_no_terminal_as_a_command() -> None:
    crashed = Measurement(ProbeStatus.CRASHED, reason=f"ValueError: {ESCAPES}")
    events = (
        Noted(ESCAPES), CandidateVetoed(1, WINNER, ESCAPES), ProbeFinished(2, PACKED, "search", crashed, best=False)
    )  # fmt: skip
    assert all("\x1b" not in line and "\x07" not in line for line in plain(*events))
    assert ESCAPES[:4] not in sent(*events)
    assert r"\x1b[2Jgone" in sent(*events)


def test_without_a_terminal_lines_are_written_as_they_are() -> None:
    console = Console(file=io.StringIO(), width=40, record=True)
    with watching(console) as listener:
        listener(EVENTS[1])
        listener(EVENTS[2])
    assert console.export_text().splitlines() == plain(*EVENTS[1:3])


def test_a_terminal_keeps_a_line_for_each_finished_probe() -> None:
    shown = live(*EVENTS)
    assert re.search(r"0 ok +12\.00 GiB +10,000 best so far +TRL's default", shown)
    assert re.search(r"2 out of memory +- +- packing=bfd", shown)
    assert "in backward, asking for 1.00 GiB" in shown


def test_a_terminal_tells_a_candidate_that_runs_again_by_its_number() -> None:
    ran = Measurement(ProbeStatus.OK)
    again = [ProbeFinished(2, PACKED, purpose, ran, best=False) for purpose in ("confirmation", "comparison")]
    shown = live(*EVENTS, *again, ProbeFinished(0, BASELINE, "comparison", ran, best=False))
    assert re.search(r"2 ok +- +- confirming probe 2\s", shown)
    assert re.search(r"2 ok +- +- short run of probe 2\s", shown)
    assert re.search(r"0 ok +- +- short run of TRL's default", shown)


def test_a_choice_that_is_changed_back_is_the_only_one_shown() -> None:
    without = WINNER.but(lora=BASELINE["lora"])
    best = ProbeFinished(3, WINNER, "search", RAN, best=True)
    started = ProbeStarted(4, without, "contribution", 16)
    shown = f"the best so far with lora={BASELINE['lora']}"
    for known in (best, StudyResumed(5, 2, 16, best)):
        assert plain(READY, known, started)[-1].endswith(f"): {shown}")
    slower = ProbeFinished(4, without, "contribution", RAN, best=False)
    assert re.search(rf"4 ok .* {shown}\s", live(READY, best, slower))
    faster = ProbeFinished(4, without, "contribution", RAN, best=True)
    assert plain(READY, best, faster)[-1].endswith(f": {differences(without, BASELINE)} (best so far)")


def test_a_terminal_is_cleared_of_the_bar_even_when_a_run_fails() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80, _environ={"TERM": "xterm"})
    with pytest.raises(KeyboardInterrupt), watching(console):
        raise KeyboardInterrupt
    assert file.getvalue().endswith("\x1b[2K") or "\x1b[?25h" in file.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_what_a_terminal_keeps_fits_it(width: int) -> None:
    assert max(len(line) for line in re.split(r"[\n\r]", live(*EVENTS, width=width))) <= width


def full(candidate: Candidate) -> str:
    """Return a candidate with every choice."""
    return " ".join(f"{knob}={choice}" for knob, choice in candidate.items())


def test_the_baseline_is_learnt_from_its_probe_too() -> None:
    assert plain(ProbeStarted(0, BASELINE, "baseline", 16), ProbeStarted(1, PACKED, "search", 16))[1].endswith(
        "packing=bfd"
    )


BEST = ProbeFinished(3, PACKED, "search", RAN, best=True)
RESUMED = (READY, StudyResumed(5, 2, 16, BEST))


def test_a_resumed_run_counts_its_earlier_probes_and_knows_the_best_of_them() -> None:
    progress = followed(*RESUMED)
    assert (progress.done, progress.vetoed, progress.limit, progress.best) == (5, 2, 16, BEST)
    assert plain(*RESUMED, ProbeStarted(9, WINNER, "search", 16))[1:] == [
        "resumed with 5 of at most 16 probes, 2 vetoed; best so far: packing=bfd (10,000 tok/s, 12.00 GiB)",
        "probe 9 started (6 of at most 16): " + differences(WINNER, BASELINE),
    ]


def test_a_resumed_run_in_a_terminal_shows_what_went_before() -> None:
    shown = live(*RESUMED)
    assert "resumed with 5 of at most 16 probes, 2 vetoed; best so far: packing=bfd" in shown
    assert "5 of at most 16 probes, 2 vetoed, " in shown


def test_a_resumed_run_in_which_nothing_fits_so_far_says_so() -> None:
    assert plain(READY, StudyResumed(1, 0, 16, None))[1] == "resumed with 1 of at most 16 probes; nothing fits so far"
    assert plain(READY, StudyResumed(0, 0, 1, None))[1] == "resumed with 0 of at most 1 probe; nothing fits so far"


def test_a_resumed_study_may_have_more_probes_than_a_lower_limit_allows() -> None:
    resumed = StudyResumed(3, 0, 2, None)
    assert plain(READY, resumed)[1] == "resumed with 3 probes, over the limit of 2; nothing fits so far"
    assert "3 probes, over the limit of 2, " in live(READY, resumed)


@pytest.mark.parametrize(
    ("purpose", "words"), [("confirmation", "confirming"), ("comparison", "short run of")], ids=str
)
def test_a_later_run_is_not_one_of_the_limited_probes(purpose: str, words: str) -> None:
    assert followed(*EVENTS, ProbeFinished(3, PACKED, purpose, RAN, best=False)).done == 2
    # In full, until the baseline is known.
    assert plain(ProbeStarted(3, PACKED, purpose, 16)) == [f"probe 3 started: {words} {full(PACKED)}"]


def test_the_best_so_far_is_kept_until_there_is_a_better() -> None:
    assert followed(*EVENTS).best_text == "best so far: TRL's default (10,000 tok/s, 12.00 GiB)"
    better = ProbeFinished(4, PACKED, "search", RAN, best=True)
    assert followed(*EVENTS, better).best_text.startswith("best so far: packing=bfd")


def test_a_candidate_whose_confirmation_failed_is_no_longer_the_best_so_far() -> None:
    other = ProbeFinished(2, PACKED, "confirmation", RAN_OUT, best=False)
    assert followed(*EVENTS, other).best is not None
    assert followed(*EVENTS, ProbeFinished(0, BASELINE, "confirmation", RAN_OUT, best=False)).best_text == ""


TRACED = (
    StageStarted("Tracing training steps with no GPU"),
    Tracing(0, 180),
    Ranked((DEFAULT,), BASELINE),
    Tracing(45, 180, 65.0),
    Ranked((FASTEST, DEFAULT), BASELINE),
)
FIRST = "first ranking: nothing fits yet, the least needs 31.00 GiB; the search goes on"


def frame(*events: Event, width: int, **environment: str) -> str:
    """Return the text that redraws a terminal after the events."""
    file = io.StringIO()
    where = {"TERM": "xterm-256color", **environment}
    console = Console(file=file, force_terminal=True, width=width, highlight=False, _environ=where)
    display = Display()
    for event in events:
        display.progress.follow(event)
    console.print(display)
    return file.getvalue()


def lines(text: str) -> list[str]:
    """Return the lines of what a terminal was sent, without styles."""
    return [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()]


def test_traces_in_a_pipe_are_a_stage_and_their_first_ranking() -> None:
    assert plain(*TRACED) == ["Tracing training steps with no GPU", FIRST]
    assert plain(TRACED[-1])[0].startswith(
        "first ranking of the candidates traced so far: gradient_checkpointing=selective lora=r16 packing=bfd "
    )
    assert plain(TRACED[-1])[0].endswith(" (9,000 tok/s, 20.00 GiB)")


@pytest.mark.parametrize("width", [60, 100, 200])
@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1"}], ids=["colour", "no colour"])
def test_traces_in_a_terminal_are_a_bar_with_counts_and_a_provisional_ranking(
    width: int, environment: dict[str, str]
) -> None:
    drawn = frame(*TRACED, width=width, **environment)
    bar, title, _, *candidates = lines(drawn)
    assert bar.endswith(" 45 of about 180 traces, about 1 min 05 s left")
    assert title == "Best candidates traced so far (provisional)"
    assert [line.split()[:5] for line in candidates] == [
        ["20.00", "GiB", "4.00", "GiB", "9,000"],
        ["31.00", "GiB", "-7.00", "GiB", "7,000"],
    ]
    # The echo of ^C fits behind each line.
    assert max(map(len, lines(drawn))) <= width - 4
    assert ("\x1b[31m" in drawn) is not bool(environment)


def test_a_candidate_that_is_too_long_for_its_line_is_cut_there() -> None:
    long = an_estimate(LONGEST.but(attention="kernels-community/vllm-flash-attn3"), 1 << 30, 1.0)
    *_, row = lines(frame(Ranked((long,), BASELINE), width=100))
    assert row.endswith("…")
    assert len(row) <= 96


def test_remaining_time_is_not_invented_before_a_trace_was_run() -> None:
    assert lines(frame(*TRACED[:2], width=100))[0].endswith(" 0 of about 180 traces")


def test_a_stage_that_is_told_above_is_not_repeated_beside_the_spinner() -> None:
    assert "Tokenising" not in frame(StageStarted("Tokenising chats.jsonl"), width=100)


def test_the_next_stage_takes_the_place_of_the_bar() -> None:
    assert "of about" not in frame(*TRACED, StageStarted("Looking for a change"), width=100)


def test_a_probe_that_starts_takes_the_place_of_the_bar() -> None:
    running = lines(frame(READY, *TRACED, ProbeStarted(2, PACKED, "search", 16), width=100))[0]
    assert running.endswith("probe 2: packing=bfd")


def test_a_dumb_terminal_gets_plain_lines() -> None:
    assert sent(*TRACED, term="dumb").splitlines() == ["Tracing training steps with no GPU", FIRST]


def test_a_probe_of_another_worker_ends_beside_the_running_one() -> None:
    progress = followed(READY, ProbeStarted(0, BASELINE, "baseline", 16))
    progress.follow(ProbeFinished(2, PACKED, "search", RAN, best=True))
    assert (progress.running_text, progress.done) == ("probe 0: TRL's default", 1)
    progress.follow(ProbeFinished(0, BASELINE, "baseline", RAN, best=False))
    assert (progress.running_text, progress.done) == ("", 2)


def test_traces_in_a_pipe_have_a_line_where_nothing_was_written_for_a_while() -> None:
    lines: list[str] = []
    now = [0.0]
    listener = PlainListener(lines.append, clock=lambda: now[0])
    for seconds, done in ((10.0, 5), (31.0, 20), (40.0, 25), (62.0, 40)):
        now[0] = seconds
        listener(Tracing(done, 100))
    now[0] = 100.0
    listener(Tracing(0, 1))
    assert lines == ["20 of about 100 traces", "40 of about 100 traces", "0 of about 1 trace"]
