"""``python -m tests.brief``: the command line, with a quick effort that measures as briefly as possible.

The quick effort measures for seconds, most of which an end-to-end test of a small model would wait for.

With the variable :data:`LONG`, all probes but the first take minutes, for a test that ends the command in one.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

from autotune.cli import main
from autotune.core.effort import EFFORTS
from autotune.core.jobs.protocol import ProbeRequest
from autotune.core.measurement import Measurement
from autotune.probing import JobServer, probe

SECONDS = 0.5
LONG = "AUTOTUNE_TESTS_LONG"
LONG_SECONDS, LONG_MICRO_BATCHES = 600.0, 20_000


def shorten() -> None:
    """Replace the quick effort."""
    quick = EFFORTS["quick"]
    searched, confirmation, comparison = (
        replace(schedule, min_seconds=0.0, max_seconds=SECONDS)
        for schedule in (quick.probe, quick.confirmation, quick.comparison)
    )
    EFFORTS["quick"] = replace(quick, probe=searched, confirmation=confirmation, comparison=comparison, comparisons=2)


def lengthen() -> None:
    """Let all probes but the first time micro-batches for minutes."""
    from autotune.app import search

    def longer(server: JobServer, request: ProbeRequest, folder: Path, timeout_seconds: float | None) -> Measurement:
        schedule = replace(
            request.schedule,
            min_seconds=LONG_SECONDS,
            max_seconds=LONG_SECONDS,
            max_micro_batches=LONG_MICRO_BATCHES,
            rate_to_beat=None,
        )
        asked = request if folder.name == "0" else replace(request, schedule=schedule)
        return probe(server, asked, folder, timeout_seconds)

    mock.patch.object(search, "run_probe", longer).start()


if __name__ == "__main__":
    shorten()
    if os.environ.get(LONG):
        lengthen()
    sys.exit(main())
