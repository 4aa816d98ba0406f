"""Opens the null device in the place of standard streams that whoever started the command has closed."""

from __future__ import annotations

import os
import sys


def open_closed_streams() -> None:
    """Make each of the three standard streams usable.

    Without one, the next file that is opened gets its number, and a child process reads or writes that; and what
    writes to ``sys.stdout`` fails, which must not read as the answer that nothing fits.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # The lowest number that is free: that of the stream.
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115, PTH123 as long as the process
            os.set_inheritable(getattr(sys, name).fileno(), True)
