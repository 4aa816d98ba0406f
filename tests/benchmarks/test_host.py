"""The host's time per operator that predictions assume, against steps that were timed."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from autotune.core.step_time import CPU_PACE, Caller

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu" / "results"
HOSTS = sorted(RESULTS.glob("host-cpu-*.json"))
CALLERS = (Caller.MODULE, Caller.HOOKED, Caller.SELECTIVE, Caller.ENGINE, Caller.PLAIN)


@pytest.mark.parametrize("file", HOSTS, ids=[file.stem for file in HOSTS])
def test_what_a_cpu_takes_to_launch_an_operator_is_what_its_steps_took(file: Path) -> None:
    steps = json.loads(file.read_text(encoding="utf-8"))["steps"]
    passes = [each for each in chain.from_iterable(step.values() for step in steps.values()) if each["operators"]]
    counts = np.array([[each["operators"].get(caller, 0) for caller in Caller] for each in passes])
    seconds = np.array([each["seconds"] for each in passes])
    # Relative errors: each pass counts alike.
    fitted, *_ = np.linalg.lstsq(counts / seconds[:, None], np.ones(len(passes)), rcond=None)
    found = dict(zip(Caller, fitted, strict=True))
    factors = {caller: found[caller] / found[Caller.MODULE] for caller in CALLERS}
    assert factors == pytest.approx(
        {caller: CPU_PACE.host_seconds(caller) / CPU_PACE.launch_seconds for caller in CALLERS}, rel=0.15
    )
