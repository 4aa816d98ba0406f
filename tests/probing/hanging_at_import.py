"""A module of jobs whose import hangs in a server, as on a network drive that does not answer."""

from __future__ import annotations

import os
import threading
from pathlib import Path

HANGING = "tests.probing.hanging_at_import"
FILE = "AUTOTUNE_TEST_HANGS"
"""Variable with the path of the file that is written before; without it, nothing hangs."""


def wait_for_a_drive(file: Path) -> None:
    """Hang."""
    file.write_text("imported as far as here")
    threading.Event().wait()


if FILE in os.environ:
    wait_for_a_drive(Path(os.environ[FILE]))
