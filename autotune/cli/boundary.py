"""Runs a command and maps its result, error or signal to an exit code and a message."""

from __future__ import annotations

import errno
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from autotune.cli.encoding import show_in_any_encoding
from autotune.cli.parser import read_arguments
from autotune.cli.programs import resume_command
from autotune.confidential import MASK, hidden, hidden_words, secrets_in
from autotune.errors import AutotuneError, causes

USAGE = 2
# sysexits.h; 1 means that nothing fits.
BUG = os.EX_SOFTWARE
INTERRUPTED = 128 + signal.SIGINT
BROKEN_PIPE = 128 + signal.SIGPIPE
# Errors caused by the user's paths or a full disk, which are no bugs.
_FILE_ERRORS = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), ("written", "Free some space.")),
    **dict.fromkeys((errno.ENAMETOOLONG, errno.ELOOP), ("opened", "Name another file.")),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), ("opened", "Raise the limit of open files (ulimit -n).")),
}
_NO_MEMORY = (
    "This process ran out of memory, or reached a limit (ulimit, control group). Free some, raise the limit, or use a "
    "smaller dataset; a search continues with --resume."
)
# EAGAIN of fork: the process limit is reached. A write to a full pipe has another message.
_NO_ROOM = (os.strerror(errno.ENOMEM), os.strerror(errno.EAGAIN))
_TERMINATION_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_OUTPUT = (1, 2)


def run(argv: Sequence[str]) -> int:
    """Run the command in ``argv`` and return the exit code.

    0: something fits; 1: nothing fits; 2: the input cannot be used; 3: not known; 70: a bug; 129, 130, 143: interrupted
    by SIGHUP, Ctrl-C or SIGTERM; 141: the reader of the output closed the pipe.
    """
    _open_closed_streams()
    show_in_any_encoding((sys.stdout, sys.stderr))
    with Signals() as signals:
        code = _exit_code(argv)
        if code != INTERRUPTED:
            return code
        _report_interrupt(argv)
        return INTERRUPTED if signals.received is None else 128 + signals.received


def _open_closed_streams() -> None:
    """Make each of the three standard streams usable.

    If one is closed, the next opened file gets its number, and child processes would read or write that file. A write
    to a missing ``sys.stdout`` would fail with exit code 1, which means that nothing fits.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # Gets the lowest free number, which is the stream's.
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115, PTH123 open until exit
            os.set_inheritable(getattr(sys, name).fileno(), True)


def _exit_code(argv: Sequence[str]) -> int:
    # Read before parsing, since parsing can fail too.
    debug = "--debug" in argv

    def show(message: str, *, trace: bool = debug) -> None:
        # Libraries quote their arguments in messages and tracebacks.
        known = secrets_in(tuple(argv))
        _print(hidden(message, known), hidden(traceback.format_exc(), known) if trace else "")

    try:
        command = read_arguments(argv[1:])
        code = command.run(command.arguments)
        sys.stdout.flush()
        return code
    except AutotuneError as error:
        show(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        return _exit_on_broken_pipe(debug)
    except Exception as error:  # noqa: BLE001 - the process ends here after any error
        if _lacks_memory(error):
            show(_NO_MEMORY)
            return USAGE
        if isinstance(error, OSError) and error.errno in _FILE_ERRORS:
            what, hint = _FILE_ERRORS[error.errno]
            show(f"{error.filename or 'A file'} cannot be {what}: {error.strerror}. {hint}")
            return USAGE
        if isinstance(error, FileNotFoundError) and error.filename is None:
            # tempfile and os.getcwd raise errors without a file name.
            temporary = "temporary" in str(error.strerror)
            hint = "Set TMPDIR to a directory that can be written." if temporary else "Go to another directory."
            show(f"{error.strerror if temporary else 'The working directory was removed'}. {hint}")
            return USAGE
        show("This is a bug of autotune; please report it with the lines above.", trace=True)
        return BUG


def _lacks_memory(error: BaseException) -> bool:
    """Return whether the machine, or a limit such as ulimit or a control group, has no memory left."""
    # The interpreter's message if a thread's stack does not fit.
    no_thread = "can't start new thread"
    return any(
        isinstance(each, MemoryError)
        or getattr(each, "strerror", None) in _NO_ROOM
        or (isinstance(each, RuntimeError) and no_thread in str(each))
        for each in causes(error)
    )


def _print(message: str, trace: str) -> None:
    print(trace, end="", file=sys.stderr)
    name = "autotune:"
    if sys.stderr.isatty() and "NO_COLOR" not in os.environ:
        name = f"\x1b[1;31m{name}\x1b[0m"
    print(name, message, file=sys.stderr)


def _report_interrupt(argv: Sequence[str]) -> None:
    command = resume_command(hidden_words(argv))
    remedy = f" No finished probe is lost; continue with:\n  {command}" if command else ""
    if MASK in remedy:
        remedy += f"\nReplace {MASK} with the secret."
    # Users may press Ctrl-C twice.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    print(f"autotune: Interrupted.{remedy}", file=sys.stderr)
    signal.signal(signal.SIGINT, before)


def _exit_on_broken_pipe(debug: bool) -> int:
    if debug:
        traceback.print_exc()
    # Python flushes its streams again at exit, into a closed pipe (docs, "Note on SIGPIPE").
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())
    return BROKEN_PIPE


class Signals:
    """Raises ``KeyboardInterrupt`` in the main thread on SIGINT, SIGTERM and SIGHUP while the context is active.

    After the first signal, SIGTERM and SIGHUP are ignored: schedulers and ``timeout`` send them several times, while
    the command ends. A second Ctrl-C is not ignored. Signals that were ignored at the start (nohup), or that a host
    program handles, keep their handlers.

    Attributes:
        received: the first signal, or None.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Signals:
        defaults = {signal.SIGINT: signal.default_int_handler, **dict.fromkeys(_TERMINATION_SIGNALS, signal.SIG_DFL)}
        for number, default in defaults.items():
            if signal.getsignal(number) is default:
                self._before[number] = default
                signal.signal(number, self._interrupt)
        return self

    def __exit__(self, *_error: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)  # type: ignore[arg-type]

    def _interrupt(self, number: int, _frame: FrameType | None) -> NoReturn:
        for asking in _TERMINATION_SIGNALS:
            if asking in self._before:
                signal.signal(asking, signal.SIG_IGN)
        self.received = self.received or signal.Signals(number)
        _leave_closed_terminals()
        raise KeyboardInterrupt


def _leave_closed_terminals() -> None:
    """Redirect the output of a closed terminal to the null device, since the command still writes while it ends."""
    for descriptor in _OUTPUT:
        try:
            # An empty write fails only if the terminal has hung up.
            os.write(descriptor, b"")
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
