"""The command line: parses arguments, calls the use cases, and shows results in the terminal."""

from __future__ import annotations

import signal
import sys

_INTERRUPTED = 128 + signal.SIGINT


def main() -> int:
    """Run the command in ``sys.argv`` and return the exit code."""
    try:
        from autotune.cli.boundary import run

        code = run(sys.argv)
    except KeyboardInterrupt:
        # Interrupted before the command line was read: nothing has started.
        code = _INTERRUPTED
    # An interrupt during the interpreter's shutdown would show a traceback.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return code
