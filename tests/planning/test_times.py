"""Times that are extrapolated from small traces."""

from __future__ import annotations

import pytest

from autotune.core.step_time import StepTime
from autotune.planning.extrapolation.forecast import mixed_times

SENDING = 10.0


def overlapping(rows: int) -> StepTime:
    """Return the time of so many rows, each of which is computed in 4 s, beside one message, however many they are."""
    computing = 4.0 * rows
    return StepTime(max(computing, SENDING), computing, 0.0, 0.0, 0.0, 0.0, 0, communication_seconds=SENDING)


@pytest.mark.parametrize(("rows", "seconds"), [(1, 10.0), (2, 10.0), (4, 16.0), (8, 32.0)])
def test_what_waits_for_a_message_in_small_traces_computes_for_longer_in_large_ones(rows: int, seconds: float) -> None:
    # From 1 and 2 rows, both of which take as long as the message.
    terms = [(overlapping(1), 2.0 - rows), (overlapping(2), rows - 1.0)]
    assert mixed_times(terms) == overlapping(rows)
    assert mixed_times(terms).seconds == seconds


def test_copies_in_both_directions_take_their_sum_at_least() -> None:
    time = StepTime(3.0, 0.0, 0.0, 0.0, 6.0, 1.0, 0)
    assert mixed_times([(time, 1.0)]).seconds == 6.0


def test_no_time_is_negative() -> None:
    assert mixed_times([(overlapping(1), -1.0)]) == StepTime(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0)
