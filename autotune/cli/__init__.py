"""The command line: words to calls of ``autotune.api``, and results to the terminal."""

from __future__ import annotations

import signal
import sys

_INTERRUPTED = 130


def main() -> int:
    """Run the command that ``sys.argv`` names and return the exit code."""
    try:
        from autotune.cli.boundary import run

        code = run(sys.argv)
    except KeyboardInterrupt:
        # Before the command line was read: nothing has begun.
        code = _INTERRUPTED
    # What is left is the interpreter's own end, of which Python would show a traceback.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return code
