"""What a CPU's own speeds are measured to be."""

from __future__ import annotations

import time
from pathlib import Path

from autotune.core.protocol import SpeedsRequest
from autotune.probing import JobServer, measure_speeds


def test_a_job_measures_products_and_copies_in_a_short_time(tmp_path: Path) -> None:
    with JobServer("cpu", threads=1) as server:
        started = time.monotonic()
        speeds = measure_speeds(server, SpeedsRequest(seconds=0.02), tmp_path)
        seconds = time.monotonic() - started
    # No CPU that runs this does less than 0.1 or more than 100,000 billion operations in a second.
    assert all(1e8 < speed < 1e14 for speed in (speeds.fp32, speeds.fp16, speeds.bf16 or 0, speeds.bandwidth))
    assert speeds.source == "measured"
    # An operator of PyTorch in eager mode takes some microseconds.
    assert 5e-7 < (speeds.launch_seconds or 0) < 1e-3
    assert seconds < 60
