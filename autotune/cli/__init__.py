"""The command line: parses arguments, calls the use cases, and shows results in the terminal."""

from __future__ import annotations

import signal
import sys

_USAGE = 2
_INTERRUPTED = 128 + signal.SIGINT


def main() -> int:
    """Run the command in ``sys.argv`` and return the exit code."""
    try:
        from autotune.cli.boundary import run

        code = run(sys.argv)
    except ImportError as error:
        # Of this package: a command's own errors are handled. The interpreter's exit code would mean that nothing fits.
        print(f"autotune: {error}. Install autotune again, with its dependencies, on Linux.", file=sys.stderr)
        code = _USAGE
    except KeyboardInterrupt:
        # Interrupted before the command line was read: nothing has started.
        code = _INTERRUPTED
    # An interrupt during the interpreter's shutdown would show a traceback.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return code
