"""A search with predictions: vetoed candidates, the order of probes, and corrections by probes."""

from __future__ import annotations

import math
from dataclasses import replace

import optuna
import pytest

from autotune.core.candidate import Candidate
from autotune.core.events import CandidateVetoed
from autotune.core.measurement import Measurement
from autotune.core.prediction import Prediction
from autotune.core.status import ProbeStatus
from autotune.study.problem import Purpose
from tests.study.foretold import Foretold, legal
from tests.study.replayed import BASELINE, LIMIT_BYTES, ReplayedTable, peak_bytes, tokens_per_second
from tests.study.running import PATIENT, Run, probed

LARGE = BASELINE.but(attention="eager")


def test_what_is_predicted_not_to_fit_is_not_probed_and_the_reason_says_the_sizes(run: Run) -> None:
    assert peak_bytes(LARGE) > 1.1 * LIMIT_BYTES
    run.problem.recipes = (LARGE,)
    outcome = run(ReplayedTable(), trials=3, predictor=Foretold(speeds=False))
    vetoed = outcome.records[1]
    assert (vetoed.candidate, vetoed.measurement.status) == (LARGE, ProbeStatus.VETOED)
    assert vetoed.measurement.reason == "predicted to need 840 B of the 600 B, ±10.0 %"
    assert any(isinstance(event, CandidateVetoed) and event.candidate == LARGE for event in run.events)


def test_no_probe_runs_out_of_memory_where_predictions_are_right(run: Run) -> None:
    outcome = run(ReplayedTable(), trials=20, predictor=Foretold(error=0.0))
    assert all(record.measurement.ok for record in probed(outcome))


def test_what_may_fit_within_the_stated_error_is_left_to_a_probe(run: Run) -> None:
    run.problem.recipes = (LARGE,)
    outcome = run(ReplayedTable(), trials=3, predictor=Foretold(error=0.5, speeds=False))
    assert outcome.records[1].measurement.status is ProbeStatus.OUT_OF_MEMORY


def test_the_sampler_is_told_how_far_a_vetoed_candidate_is_predicted_to_be_over(durable: Run) -> None:
    durable.problem.recipes = (LARGE,)
    outcome = durable(ReplayedTable(), trials=3, predictor=Foretold(speeds=False))
    study = optuna.load_study(study_name="s", storage=durable.url)
    constraints = study.trials[outcome.records[1].number].constraints
    assert list(constraints.values()) == [pytest.approx(peak_bytes(LARGE) / LIMIT_BYTES - 1)]


def test_the_baseline_is_probed_whatever_is_predicted_of_it(run: Run) -> None:
    predictor = Foretold(need=lambda _: 100 * LIMIT_BYTES)
    outcome = run(ReplayedTable(), trials=3, predictor=predictor)
    assert [record.candidate for record in probed(outcome)] == [BASELINE]
    assert outcome.winner is not None
    assert outcome.winner.candidate == BASELINE


def test_what_was_not_traced_is_traced_before_it_is_vetoed_or_probed(run: Run) -> None:
    fits, does_not = BASELINE.but(batch=4), LARGE
    assert LIMIT_BYTES / 2 < peak_bytes(fits) < LIMIT_BYTES
    run.problem.recipes = (fits, does_not)
    predictor = Foretold(is_traced=lambda _: False, speeds=False)
    outcome = run(ReplayedTable(), trials=3, predictor=predictor)
    assert [record.measurement.status for record in outcome.records[1:3]] == ["ok", "vetoed"]
    assert predictor.traced_later[:3] == [BASELINE, fits, does_not]


def test_the_fastest_that_is_predicted_to_fit_is_probed_right_after_the_baseline(run: Run) -> None:
    run.problem.recipes = (BASELINE.but(batch=1),)
    outcome = run(ReplayedTable(), trials=4, predictor=Foretold())
    optimum = max(tokens_per_second(item) for item in legal() if peak_bytes(item) <= LIMIT_BYTES)
    first, second = probed(outcome)[:2]
    assert first.candidate == BASELINE
    assert second.tokens_per_second == optimum


class OfFitting(Foretold):
    """Predicts no speed of what does not fit."""

    def predict(self, candidate: Candidate) -> Prediction | None:
        """Predict."""
        guess = super().predict(candidate)
        return replace(guess, tokens_per_second=None) if guess and guess.over(LIMIT_BYTES) else guess


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("factor", [1, 2])
def test_after_a_default_that_runs_out_the_fastest_that_is_predicted_to_fit_comes_next(factor: int, seed: int) -> None:
    """With twice the need, most of what was traced does not fit, and has no predicted speed."""
    run = Run("sqlite://")
    run.problem.baseline = LARGE
    predictor = OfFitting(error=0.0, need=lambda candidate: factor * peak_bytes(candidate))
    first, second = probed(run(ReplayedTable(), trials=4, seed=seed, predictor=predictor))[:2]
    assert (first.candidate, first.measurement.status) == (LARGE, ProbeStatus.OUT_OF_MEMORY)
    fitting = [each for each in legal() if predictor.need(each) <= LIMIT_BYTES]
    assert (len(fitting) < len(legal()) / 2) is (factor == 2)
    assert second.tokens_per_second == max(map(tokens_per_second, fitting))


@pytest.mark.parametrize("seed", range(3))
def test_a_choice_with_which_probes_crash_is_given_up_soon(seed: int) -> None:
    crash = Measurement(ProbeStatus.CRASHED, "RuntimeError: no kernel image is available")
    table = ReplayedTable(shown={each: crash for each in legal() if each["attention"] == "flash"})
    outcome = Run("sqlite://")(table, effort=replace(PATIENT, trials=16, patience=16), seed=seed, predictor=Foretold())
    others = (each for each in legal() if each["attention"] != "flash" and peak_bytes(each) <= LIMIT_BYTES)
    best = max(others, key=tokens_per_second)
    assert outcome.winner is not None
    assert outcome.winner.candidate == best
    assert best in [record.candidate for record in probed(outcome)][:6]


def test_recipes_come_first_where_no_speed_is_predicted(run: Run) -> None:
    recipe = BASELINE.but(batch=1)
    run.problem.recipes = (recipe,)
    outcome = run(ReplayedTable(), trials=4, predictor=Foretold(speeds=False))
    assert outcome.records[1].candidate == recipe


def test_every_probe_is_told_once_and_again_to_a_resumed_search(durable: Run) -> None:
    first, second = Foretold(), Foretold()
    before = durable(ReplayedTable(), trials=4, predictor=first)
    durable(ReplayedTable(), trials=6, predictor=second, resume=True)
    assert first.learned == [(record.candidate, record.measurement) for record in probed(before)]
    assert second.learned[: len(first.learned)] == first.learned
    assert len({candidate for candidate, _ in second.learned}) == len(second.learned) == 6


def test_what_was_predicted_is_kept_with_the_trial(durable: Run) -> None:
    before = durable(ReplayedTable(), trials=4, predictor=Foretold())
    after = durable(ReplayedTable(), trials=4, resume=True)
    assert [record.prediction for record in after.records] == [record.prediction for record in before.records]
    assert all(record.prediction for record in probed(after))


def test_a_change_back_that_is_predicted_not_to_fit_is_not_measured_and_says_why(run: Run) -> None:
    winner = BASELINE.but(attention="flash", batch=16)
    assert peak_bytes(winner.but(attention="sdpa")) > 1.1 * LIMIT_BYTES
    unbeatable = Measurement(ProbeStatus.OK, peak_bytes=600, tokens_per_second=1e9)
    predictor = Foretold(rate=lambda candidate: 1e9 if candidate == winner else tokens_per_second(candidate))
    predictor.need = lambda candidate: LIMIT_BYTES if candidate == winner else peak_bytes(candidate)
    outcome = run(ReplayedTable(shown={winner: unbeatable}), trials=6, predictor=predictor)
    changed = {contribution.knob: contribution for contribution in outcome.contributions}
    assert changed["attention"].status is ProbeStatus.VETOED
    assert "predicted to need" in changed["attention"].reason


def test_a_change_back_that_an_earlier_search_vetoed_is_not_measured_and_says_why(durable: Run) -> None:
    winner = BASELINE.but(attention="flash", batch=16)
    unbeatable = Measurement(ProbeStatus.OK, peak_bytes=600, tokens_per_second=1e9)
    durable.problem.recipes = (winner, winner.but(attention="sdpa"))
    table = ReplayedTable(shown={winner: unbeatable})
    durable(
        table, trials=6, predictor=Foretold(need=lambda each: 1 if each == winner else peak_bytes(each), speeds=False)
    )
    outcome = durable(table, trials=7, resume=True)
    changed = {contribution.knob: contribution for contribution in outcome.contributions}
    assert changed["attention"].reason == "predicted to need 968 B of the 600 B, ±10.0 %"


def test_a_vetoed_candidate_that_is_not_predicted_any_more_stays_vetoed(durable: Run) -> None:
    durable.problem.recipes = (LARGE,)
    durable(ReplayedTable(), trials=2, predictor=Foretold(speeds=False))
    after = durable(ReplayedTable(), trials=6, resume=True)
    assert LARGE not in {record.candidate for record in probed(after)}


def test_that_nothing_fits_is_not_said_on_the_word_of_predictions_alone(run: Run) -> None:
    wrong = Foretold(need=lambda candidate: 10 * peak_bytes(candidate) + 10 * LIMIT_BYTES)
    small = ReplayedTable(shown={BASELINE: Measurement(ProbeStatus.OUT_OF_MEMORY)})
    outcome = run(small, predictor=wrong)
    _, smallest, *_ = probed(outcome)
    assert peak_bytes(smallest.candidate) == min(map(peak_bytes, legal()))
    assert outcome.winner is not None
    assert outcome.winner.candidate == smallest.candidate


@pytest.mark.nightly
def test_rough_predictions_spare_probes_and_running_out_of_memory() -> None:
    def distorted(candidate: Candidate) -> float:
        """Up to a third too fast or too slow, by technique, as a roofline is."""
        return tokens_per_second(candidate) * (1.3 if candidate["checkpointing"] == "on" else 0.8)

    optimum = max(tokens_per_second(item) for item in legal() if peak_bytes(item) <= LIMIT_BYTES)

    def probes_needed(told: bool, seed: int) -> tuple[float, int]:
        effort = replace(PATIENT, trials=40, patience=40)
        predictor = Foretold(rate=distorted) if told else None
        outcome = Run("sqlite://")(ReplayedTable(), effort=effort, seed=seed, predictor=predictor)
        searched = [record for record in probed(outcome) if record.purpose is not Purpose.CONTRIBUTION]
        rates = [record.tokens_per_second >= 0.98 * optimum for record in searched]
        return rates.index(True) if True in rates else math.inf, sum(not item.measurement.ok for item in searched)

    blind, told = zip(*[(probes_needed(False, seed), probes_needed(True, seed)) for seed in range(5)], strict=True)
    assert sum(count for count, _ in told) < 0.9 * sum(count for count, _ in blind)
    assert sum(failed for _, failed in told) < 0.5 * sum(failed for _, failed in blind)
