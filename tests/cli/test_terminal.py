"""The command in a terminal: its live display, and the screen after Ctrl-C."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import sys
import termios

import pytest

from tests.cli.screen import screen

CTRL_C = b"\x03"
# The command with a function in the place of the API's, which traces for minutes: it tells what that would, then waits.
SCRIPT = """
import os, sys, time, types
from autotune.core.events import Ranked, StageStarted, Tracing
from tests.reporting.examples import BASELINE
from tests.reporting.plans import DEFAULT, FASTEST, a_plan

def plan(*, listener, **options):
    listener(StageStarted("Reading M and tokenising synthetic rows"))
    listener(StageStarted("Tracing training steps with no GPU"))
    listener(Tracing(0, 180))
    listener(Ranked((DEFAULT,), BASELINE))
    listener(Tracing(45, 180, 65.0))
    listener(Ranked((FASTEST, DEFAULT), BASELINE))
    if WAITS:
        while True:  # signal.pause() would miss a signal that comes right before it
            time.sleep(0.05)
    return a_plan()

module = sys.modules["autotune.app.plan"] = types.ModuleType("autotune.app.plan")
module.plan = plan
from autotune.cli.boundary import run
sys.exit(run(["autotune", "plan", "M", "--seq-len", "8"]))
"""


def in_a_terminal(columns: int, *, interrupted_at: str = "", **environment: str) -> tuple[int, str]:
    """Run the command, press Ctrl-C, and return the exit code and all that was sent.

    Args:
        interrupted_at: words after which Ctrl-C is pressed.
    """
    program = [sys.executable, "-c", SCRIPT.replace("WAITS", str(bool(interrupted_at)))]
    process, terminal = pty.fork()
    if not process:
        os.environ.pop("NO_COLOR", None)
        os.environ.pop("COLUMNS", None)
        os.environ.update({"TERM": "xterm-256color", **environment})
        # The window has its size before anything asks for it.
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        os.execv(program[0], program)
    sent, pressed = b"", False
    while True:
        try:
            received = os.read(terminal, 4096)
        except OSError:  # the other end is closed
            break
        sent += received
        if interrupted_at and not pressed and interrupted_at.encode() in sent:
            os.write(terminal, CTRL_C)
            pressed = True
    os.close(terminal)
    _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status), sent.decode()


@pytest.mark.parametrize("columns", [100, 200])
@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1"}], ids=["colour", "no colour"])
def test_ctrl_c_leaves_the_stages_one_message_and_a_visible_cursor(columns: int, environment: dict[str, str]) -> None:
    code, sent = in_a_terminal(columns, interrupted_at="9,000", **environment)
    shown = screen(sent, columns)
    assert code == 130
    assert "about 1 min 05 s left" in sent
    assert [line.rstrip() for line in shown.lines if line.strip()] == [
        "Reading M and tokenising synthetic rows",
        "Tracing training steps with no GPU",
        "autotune: Interrupted.",
    ]
    assert shown.cursor
    assert shown.column == 0
    assert not shown.wrapped


@pytest.mark.parametrize("columns", [100, 200])
def test_the_plan_takes_the_place_of_the_bar_and_the_provisional_ranking(columns: int) -> None:
    code, sent = in_a_terminal(columns)
    shown = screen(sent, columns)
    text = "\n".join(shown.lines)
    assert code == 0
    assert "The fastest that fits: 9,000 tok/s" in text
    assert "provisional" not in text
    assert " left" not in text
    assert shown.cursor
    assert not shown.wrapped


def test_a_dumb_terminal_gets_no_control_codes() -> None:
    code, sent = in_a_terminal(100, interrupted_at="first ranking", TERM="dumb")
    assert code == 130
    assert "\x1b" not in sent
    assert "first ranking" in sent


def test_without_colour_nothing_is_coloured() -> None:
    _, sent = in_a_terminal(100, NO_COLOR="1")
    assert not [code for code in range(30, 38) if f"\x1b[{code}m" in sent or f";{code}m" in sent]
