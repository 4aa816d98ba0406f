"""Ends a command on SIGTERM and SIGHUP the way Ctrl-C ends it."""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType
from typing import NoReturn

_ASKING = (signal.SIGTERM, signal.SIGHUP)
_OUTPUT = (1, 2)


class Signals:
    """Raises ``KeyboardInterrupt`` in the main thread on SIGINT, SIGTERM and SIGHUP while the context is active.

    After the first of them SIGTERM and SIGHUP are ignored: schedulers and ``timeout`` send theirs several times, and an
    orderly end takes a moment. Ctrl-C can be pressed again. A signal that was ignored at the start (nohup), or that a
    host program handles, is left alone.

    Attributes:
        received: the first signal, or None.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Signals:
        defaults = {signal.SIGINT: signal.default_int_handler, **dict.fromkeys(_ASKING, signal.SIG_DFL)}
        for number, default in defaults.items():
            if signal.getsignal(number) is default:
                self._before[number] = default
                signal.signal(number, self._interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)  # type: ignore[arg-type]

    def _interrupt(self, number: int, _frame: FrameType | None) -> NoReturn:
        for asking in _ASKING:
            if asking in self._before:
                signal.signal(asking, signal.SIG_IGN)
        self.received = self.received or signal.Signals(number)
        _leave_closed_terminals()
        raise KeyboardInterrupt


def _leave_closed_terminals() -> None:
    """Replace output that went to a terminal that is gone by the null device: the end of the command still writes."""
    for descriptor in _OUTPUT:
        try:
            # Fails where the terminal has hung up, and writes nothing elsewhere.
            os.write(descriptor, b"")
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
