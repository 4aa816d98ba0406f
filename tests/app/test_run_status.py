"""The status of a run in which nothing can be recommended: nothing fits, every probe failed, or nothing was decided."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.app.outcome import result_of
from autotune.core.measurement import Measurement
from autotune.core.status import Ending, ProbeStatus, RunStatus
from tests.app.test_outcome import FACTS, PROBLEM, RAN_OUT, outcome_of, ran, record, result


def test_a_time_limit_before_anything_was_decided_is_no_proof_that_nothing_fits() -> None:
    cut_off = record(0, replace(RAN_OUT, status=ProbeStatus.TIMEOUT, out_of_memory=None))
    assert result(cut_off).status is RunStatus.UNDECIDED


@pytest.mark.parametrize("shown", [RAN_OUT, ran(100)])
def test_a_default_that_may_not_be_recommended_decides_nothing_where_a_limit_ends_the_search(
    shown: Measurement,
) -> None:
    found = outcome_of(record(0, shown))
    assert result_of(replace(found, ending=Ending.TIME), PROBLEM, FACTS).status is RunStatus.UNDECIDED
    exhausted = result_of(replace(found, ending=Ending.EXHAUSTED), PROBLEM, FACTS).status
    assert exhausted is (RunStatus.NOTHING_FITS if shown is RAN_OUT else RunStatus.FAILED)
    other = outcome_of(record(0, shown), record(1, RAN_OUT, max_length=2000))
    assert result_of(replace(other, ending=Ending.TIME), PROBLEM, FACTS).status is RunStatus.NOTHING_FITS


def test_where_every_probe_crashes_the_search_failed_and_nothing_is_said_of_memory() -> None:
    crash = replace(RAN_OUT, status=ProbeStatus.CRASHED, out_of_memory=None)
    unsupported = record(2, replace(crash, status=ProbeStatus.UNSUPPORTED), max_length=2000)
    assert result(record(1, crash, max_length=2000), unsupported).status is RunStatus.FAILED
    assert result(record(1, ran(100), crash, max_length=2000), unsupported).status is RunStatus.FAILED
    assert result(record(1, ran(100), RAN_OUT, max_length=2000), unsupported).status is RunStatus.NOTHING_FITS
