"""``python -m tests.brief``: the command line, whose quick effort measures for as short a time as it can.

The quick effort measures for seconds, most of which an end-to-end test of a small model would wait for.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from autotune.cli import main
from autotune.core.effort import EFFORTS

SECONDS = 0.5


def shorten() -> None:
    """Replace the quick effort."""
    quick = EFFORTS["quick"]
    probe, confirmation, comparison = (
        replace(schedule, min_seconds=0.0, max_seconds=SECONDS)
        for schedule in (quick.probe, quick.confirmation, quick.comparison)
    )
    EFFORTS["quick"] = replace(quick, probe=probe, confirmation=confirmation, comparison=comparison, comparisons=2)


if __name__ == "__main__":
    shorten()
    sys.exit(main())
