"""The next candidate after one that ran out of memory, or after failed traces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from autotune.core.candidate import Candidate
from autotune.core.measurement import Measurement, OutOfMemory
from autotune.core.prediction import Prediction
from autotune.core.program import BACKWARD
from autotune.core.status import Ending, ProbeStatus
from tests.study.foretold import Foretold, legal
from tests.study.replayed import BASELINE, LIMIT_BYTES, ReplayedTable, peak_bytes
from tests.study.running import PATIENT, Run, probed

RAN_OUT = Measurement(
    ProbeStatus.OUT_OF_MEMORY, "in backward", out_of_memory=OutOfMemory(BACKWARD, 400, 300, LIMIT_BYTES)
)
SMALLEST = min(legal(), key=peak_bytes)


@dataclass
class Raised(Foretold):
    """Raises predictions until that of a candidate that ran out of memory exceeds the limit."""

    factor: float = 1.0

    def predict(self, candidate: Candidate) -> Prediction | None:
        """Predict."""
        guess = super().predict(candidate)
        return guess and replace(guess, need_bytes=int(self.factor * guess.need_bytes))

    def learn(self, candidate: Candidate, measurement: Measurement) -> None:
        """Record the candidate, and raise the predictions."""
        super().learn(candidate, measurement)
        if not measurement.ok:
            self.factor = max(self.factor, (LIMIT_BYTES + 1) / self.need(candidate))


@dataclass
class Partly(Foretold):
    """Predicts too little, by a factor of each choice, and nothing of some candidates.

    Attributes:
        unknown: whether a candidate cannot be predicted.
    """

    unknown: Callable[[Candidate], bool] = lambda _: False

    def predict(self, candidate: Candidate) -> Prediction | None:
        """Predict."""
        return None if self.unknown(candidate) else super().predict(candidate)

    def trace(self, candidate: Candidate) -> Prediction | None:
        """Trace the candidate."""
        super().trace(candidate)
        return self.predict(candidate)

    def least(self, goes_on: Callable[[], bool] = lambda: True) -> Candidate | None:
        """Return the one of those that it can predict."""
        return min((item for item in legal() if not self.unknown(item)), key=self.need, default=None)


def test_after_a_surprise_the_smallest_predicted_need_comes_next_and_then_the_search_goes_on(run: Run) -> None:
    predictor = Raised(need=lambda candidate: peak_bytes(candidate) // 3)
    table = ReplayedTable(shown={BASELINE: RAN_OUT})
    outcome = run(table, trials=6, predictor=predictor)
    first, second, third, *_ = probed(outcome)
    assert first.candidate == BASELINE
    assert second.candidate == SMALLEST
    assert predictor.need(third.candidate) < predictor.need(BASELINE)
    assert outcome.winner is not None
    assert outcome.smallest is None


def test_a_default_that_runs_out_as_predicted_is_no_surprise(run: Run) -> None:
    run.problem.baseline = BASELINE.but(attention="eager", batch=16)
    outcome = run(ReplayedTable(), trials=4, predictor=Foretold())
    first, second, *_ = probed(outcome)
    assert not first.measurement.ok
    assert second.measurement.ok
    assert second.candidate != SMALLEST


def test_once_nothing_is_predicted_to_fit_the_smallest_need_is_probed_next(run: Run) -> None:
    run.problem.baseline = BASELINE.but(attention="eager", batch=16)
    predictor = Foretold(need=lambda candidate: LIMIT_BYTES + peak_bytes(candidate))
    outcome = run(ReplayedTable(limit_bytes=0), trials=4, predictor=predictor)
    assert [record.candidate for record in probed(outcome)][:2] == [run.problem.baseline, SMALLEST]


def test_a_search_whose_traces_fail_traces_few_candidates_before_each_probe(run: Run) -> None:
    predictor = Partly(is_traced=lambda _: False, unknown=lambda _: True)
    outcome = run(ReplayedTable(), trials=6, predictor=predictor)
    assert len(probed(outcome)) == 6
    assert len(predictor.traced_later) <= 6 * 4


def test_a_search_that_traces_in_vain_ends_by_its_patience(run: Run) -> None:
    predictor = Foretold(is_traced=lambda _: False, need=lambda candidate: LIMIT_BYTES + peak_bytes(candidate))
    outcome = run(ReplayedTable(limit_bytes=0), trials=6, predictor=predictor)
    assert (outcome.winner, outcome.ending) == (None, Ending.PATIENCE)
    assert len(predictor.traced_later) < len(legal()) / 2


@pytest.mark.parametrize("trials", [2, 4])
def test_that_nothing_fits_is_said_only_after_the_smallest_predicted_need_was_probed(run: Run, trials: int) -> None:
    predictor = Foretold(need=lambda candidate: peak_bytes(candidate) - 200)
    outcome = run(ReplayedTable(limit_bytes=0), trials=trials, predictor=predictor)
    assert len(probed(outcome)) <= trials
    assert (outcome.winner, outcome.smallest is not None) == (None, True)
    smallest = outcome.smallest
    assert smallest is not None
    assert (smallest.candidate, smallest.predicted_bytes) == (SMALLEST, predictor.need(SMALLEST))
    (record,) = (record for record in outcome.records if record.number == smallest.number)
    assert record.candidate == SMALLEST
    assert record.measurement.status is ProbeStatus.OUT_OF_MEMORY


def test_a_search_without_a_trial_left_for_the_smallest_predicted_need_says_so(run: Run) -> None:
    outcome = run(ReplayedTable(limit_bytes=0), trials=1, predictor=Foretold(need=lambda _: 10))
    assert outcome.smallest is not None
    assert outcome.smallest.number is None
    assert outcome.ending is Ending.TRIALS


def test_the_last_probe_is_kept_for_the_smallest_predicted_need(run: Run) -> None:
    crash = Measurement(ProbeStatus.CRASHED, "signal 9")
    table = ReplayedTable(shown={**dict.fromkeys(legal(), crash), BASELINE: RAN_OUT})
    predictor = Foretold(need=lambda item: LIMIT_BYTES + 1 if item == BASELINE else peak_bytes(item) // 2)
    outcome = run(table, trials=4, predictor=predictor)
    assert [record.candidate for record in probed(outcome)][-1] == SMALLEST


def test_a_winner_that_runs_out_of_memory_later_is_learnt_and_the_search_goes_on_below_it(run: Run) -> None:
    predictor = Raised()
    table = ReplayedTable()
    undisturbed = Run("sqlite://")(ReplayedTable(), trials=9, predictor=Foretold()).winner
    assert undisturbed is not None
    failing = undisturbed.candidate
    table.shown[failing, PATIENT.confirmation] = RAN_OUT
    outcome = run(table, trials=9, effort=replace(PATIENT, patience=3), predictor=predictor)
    assert (failing, RAN_OUT) in predictor.learned
    confirmed = next(index for index, call in enumerate(table.calls) if call[1:] == (failing, PATIENT.confirmation))
    later = {item for _, item, schedule in table.calls[confirmed + 1 :] if schedule == PATIENT.probe}
    assert later
    assert all(predictor.need(item) < predictor.need(failing) for item in later)
    assert outcome.winner is not None
    assert outcome.winner.candidate != failing


def test_what_another_run_confirmed_in_vain_is_learnt_by_a_resumed_search_once(durable: Run) -> None:
    table = ReplayedTable(shown={(BASELINE, PATIENT.confirmation): RAN_OUT})
    durable(table, trials=1, predictor=Foretold())
    predictor = Foretold()
    durable(ReplayedTable(), trials=2, predictor=predictor, resume=True)
    assert predictor.learned.count((BASELINE, RAN_OUT)) == 1


def test_a_change_back_above_what_ran_out_is_not_measured_and_says_why(run: Run) -> None:
    winner, changed = BASELINE.but(attention="flash", batch=4), BASELINE.but(batch=4)
    unbeatable = Measurement(ProbeStatus.OK, peak_bytes=300, tokens_per_second=1e9)
    predictor = Foretold(rate=lambda candidate: 1e9 if candidate == winner else 1.0)
    predictor.need = lambda candidate: 300 if candidate == winner else 400
    table = ReplayedTable(shown={**dict.fromkeys(legal(), RAN_OUT), winner: unbeatable})
    outcome = run(table, trials=4, predictor=predictor)
    reasons = {item.knob: item.reason for item in outcome.contributions}
    assert outcome.winner is not None
    assert outcome.winner.candidate == winner
    assert changed not in [record.candidate for record in probed(outcome)]
    assert reasons["attention"] == "predicted to need 400 B, and probe 0, predicted to need 400 B, ran out of memory"
