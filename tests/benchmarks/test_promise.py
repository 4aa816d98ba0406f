"""A promise is made and compared with later runs; nothing is trained here."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from autotune.core.documents.result import MeasuredCandidate
from autotune.core.effort import EFFORTS
from autotune.core.measurement import Measurement, Schedule
from autotune.core.spread import Interval, prediction_interval
from autotune.core.status import ProbeStatus
from autotune.emit.document import json_text
from benchmarks.probe import promise
from tests.reporting.examples import a_choosable, a_result, nothing_fits

EFFORT = EFFORTS["quick"]


@dataclass
class Runs:
    """Answers each run with a rate that grows, or with running out of memory at a given one."""

    failing_at: int | None = None
    seen: list[tuple[int, Schedule, int]] = field(default_factory=list)

    def __call__(self, one: MeasuredCandidate, schedule: Schedule, pair: int) -> Measurement:
        """Answer."""
        self.seen.append((one.number, schedule, pair))
        if len(self.seen) == self.failing_at:
            return Measurement(ProbeStatus.OUT_OF_MEMORY, "in backward")
        rate = 100.0 * (one.number + 1) + len(self.seen)
        return Measurement(ProbeStatus.OK, tokens_per_second=rate, peak_bytes=one.number + len(self.seen))


def chosen() -> MeasuredCandidate:
    recommended = a_result().recommended
    assert recommended is not None
    return recommended


def test_a_new_promise_is_made_as_a_search_makes_it() -> None:
    runs = Runs()
    made = promise.promised(chosen(), a_result().baseline, EFFORT, runs)
    numbers = [(number, pair) for number, _, pair in runs.seen]
    assert numbers == [(8, -1), (8, 0), (0, 0), (0, 1), (8, 1), (8, 2), (0, 2), (0, 3), (8, 3)]
    assert [schedule for _, schedule, _ in runs.seen] == [EFFORT.confirmation, *[EFFORT.comparison] * 8]
    assert made.expected == prediction_interval([901.0, 902.0, 905.0, 906.0, 909.0], [103.0, 104.0, 107.0, 108.0])
    assert made.peak_bytes == 8 + 9


@pytest.mark.parametrize("baseline", [None, nothing_fits().baseline])
def test_without_a_baseline_that_runs_the_short_runs_are_the_candidates_alone(
    baseline: MeasuredCandidate | None,
) -> None:
    runs = Runs()
    promise.promised(chosen(), baseline, EFFORT, runs)
    assert [number for number, _, _ in runs.seen] == [8] * (1 + EFFORT.comparisons)


def test_a_run_that_fails_ends_the_benchmark_with_its_reason() -> None:
    with pytest.raises(SystemExit, match="out_of_memory: in backward"):
        promise.promised(chosen(), None, EFFORT, Runs(failing_at=3))


def test_a_bundle_without_a_range_is_refused() -> None:
    with pytest.raises(SystemExit, match="states no range"):
        promise.written(replace(chosen(), tokens_per_second_low=None))


def test_a_bundle_is_read_back(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(json_text(a_result()), encoding="utf-8")
    found = promise.found([str(tmp_path)], tmp_path, Namespace())
    assert found == a_result(output_directory=str(tmp_path))


def test_real_rates_are_counted_and_set_beside_the_promise() -> None:
    said = promise.Promise(100.0, Interval(90.0, 112.0), 1000)
    said_of_all = promise.summed_up([(said, promise.Kept(rate, 1100)) for rate in (89.0, 90.0, 112.0)])
    assert said_of_all.startswith("2 of 3 real rates are within the promised range.")
    assert "real / promised rate: 0.890 to 1.120" in said_of_all
    assert "peak: at most 1.100" in said_of_all


def test_the_rate_of_a_real_run_leaves_its_first_seconds_out() -> None:
    slow_start = [(0.0, 0.0), (2.0, 10.0), (4.0, 20.0), (5.0, 120.0), (6.0, 220.0), (7.0, 320.0)]
    assert promise.settled_rate(slow_start) == pytest.approx(100.0)
    assert promise.settled_rate([(0.0, 0.0), (0.5, 10.0), (1.0, 20.0), (1.5, 40.0)]) == pytest.approx(40.0)


def test_a_run_takes_about_as_many_steps_as_the_seconds_hold() -> None:
    tokens = a_result().workload.dataset.lengths.tokens
    once = a_choosable(0, chosen().candidate, tokens_per_second=tokens / 10, token_coverage=1.0, steps_per_epoch=100)
    assert promise.steps_in(20.0, once, a_result()) == 200
    assert promise.steps_in(0.01, once, a_result()) == 6
