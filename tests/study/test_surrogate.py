"""The surrogate's predictions: exact for traced candidates, interpolated for others, corrected by probes."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from autotune.core.candidate import Candidate, Choice
from autotune.core.measurement import Measurement
from autotune.core.status import ProbeStatus
from autotune.study.gaussian import ERROR_VARIANCES, TRACED_VARIANCE, Codes, FigureModel, Process
from autotune.study.problem import Purpose, Record
from autotune.study.proposals import Surrogate
from tests.study.foretold import Foretold, legal
from tests.study.replayed import BASELINE, LIMIT_BYTES, ReplayedTable, TableProblem, peak_bytes, tokens_per_second
from tests.study.running import PATIENT, Run, probed

CHOICES = TableProblem().choices


def probe(number: int, candidate: Candidate, rate: float) -> Record:
    measured = Measurement(ProbeStatus.OK, peak_bytes=peak_bytes(candidate), tokens_per_second=rate)
    return Record(number, candidate, Purpose.SEARCH, measured)


def order(predictor: Foretold, records: list[Record], *candidates: Candidate) -> list[Candidate]:
    recommendable = [record.candidate for record in records]
    return Surrogate(CHOICES, records, LIMIT_BYTES, predictor).rank_by_gain(candidates, recommendable)


def test_a_process_is_a_joint_normal_distribution_conditioned_on_its_values() -> None:
    source = np.random.default_rng(0)
    rows = source.integers(0, 3, (40, 2)).astype(np.int16)
    shared = np.array([[sum(one == other) for other in rows] for one in rows])
    kernel = TRACED_VARIANCE.choice * shared + TRACED_VARIANCE.combination * np.exp(-(2 - shared) / 2)
    # Two values and a third one, drawn together so often that those near the two show what the third is then.
    three = [0, 1, 2]
    drawn = source.multivariate_normal(np.zeros(3), kernel[np.ix_(three, three)], 400_000)
    values = np.array([0.3, -0.3])
    near = drawn[np.abs(drawn[:, :2] - values).max(axis=1) < 0.05]
    mean, deviation = Process(rows[:2], values, replace(TRACED_VARIANCE, noise=1e-6))(rows[2:3])
    assert len(near) > 100
    assert mean[0] == pytest.approx(near[:, 2].mean(), abs=0.04)
    assert deviation[0] == pytest.approx(near[:, 2].std(), abs=0.04)


def test_the_likelihood_of_values_is_their_density_whatever_they_have_in_common() -> None:
    source = np.random.default_rng(0)
    rows, values = source.integers(0, 3, (6, 2)).astype(np.int16), source.normal(size=6)

    def difference(common: float) -> float:
        """Return by how much the logarithm of the density is larger with one variance than with another."""
        trusting, doubting = (
            np.linalg.inv(
                Process(rows, values, level)._kernel(rows) + level.noise * np.eye(6) + common * np.ones((6, 6))
            )
            for level in (ERROR_VARIANCES[-1], ERROR_VARIANCES[0])
        )
        found = [(np.linalg.slogdet(each)[1] - values @ each @ values) / 2 for each in (trusting, doubting)]
        return float(found[0] - found[1])

    trusting, doubting = (
        Process(rows, values + 5, level).log_likelihood for level in (ERROR_VARIANCES[-1], ERROR_VARIANCES[0])
    )
    assert trusting - doubting == pytest.approx(difference(1e5), rel=1e-3)


@pytest.mark.parametrize(("factor", "trusted"), [(1.0, True), (3.0, False)])
def test_predictions_that_eight_probes_confirm_are_trusted_for_others(factor: float, trusted: bool) -> None:
    probes, (other,) = legal()[:80:10], legal()[85:86]
    predicted = {each: math.log(tokens_per_second(each)) for each in legal()}
    slower = math.log(factor)
    measured = {each: predicted[each] - slower * (each["checkpointing"] == "on") + 0.1 for each in probes}
    unsure = FigureModel(Codes(CHOICES), predicted, {})([other]).unmeasured[0]
    assert unsure > 0.4
    assert (FigureModel(Codes(CHOICES), predicted, measured)([other]).unmeasured[0] < 0.2) == trusted


def test_the_order_of_traced_candidates_is_that_of_their_predictions() -> None:
    fitting = [candidate for candidate in legal() if peak_bytes(candidate) <= LIMIT_BYTES]
    found = order(Foretold(), [], *random.Random(0).sample(fitting, 30))
    assert found == sorted(found, key=tokens_per_second, reverse=True)


def test_what_was_not_traced_is_expected_from_the_choices_of_what_was() -> None:
    traced = set(random.Random(1).sample(legal(), len(legal()) // 4))
    unknown = [candidate for candidate in legal() if candidate not in traced]
    surrogate = Surrogate(CHOICES, [], LIMIT_BYTES, Foretold(is_traced=traced.__contains__))
    errors = [abs(surrogate.excess(each) - math.log(peak_bytes(each) / LIMIT_BYTES)) for each in unknown]
    assert np.median(errors) < 0.1


def test_a_choice_that_is_slower_than_predicted_is_slower_in_untraced_candidates_too() -> None:
    fast, slow = BASELINE.but(liger="on"), BASELINE.but(liger="off")
    others: list[dict[str, Choice]] = [
        {"batch": batch, "checkpointing": kept} for batch, kept in product((1, 2, 4), ("on", "off"))
    ]
    traced = [each.but(**other) for each in (fast, slow) for other in others[:3]]
    rates = {each: 200.0 if each["liger"] == "on" else 100.0 for each in legal()}
    predictor = Foretold(is_traced=traced.__contains__, rate=rates.__getitem__)
    unknown = [each.but(**others[4]) for each in (fast, slow)]
    assert order(predictor, [], *unknown)[0] == unknown[0]
    measured = [probe(number, each, 50.0 if number < 3 else 100.0) for number, each in enumerate(traced)]
    assert order(predictor, measured, *unknown)[0] == unknown[1]


def test_of_equally_fast_candidates_the_untraced_one_comes_first_and_what_cannot_fit_comes_last() -> None:
    large = max(legal(), key=peak_bytes)
    small, unknown = BASELINE.but(batch=1), BASELINE.but(batch=2)
    predictor = Foretold(is_traced=(small, large).__contains__, rate=lambda _: 100.0)
    assert order(predictor, [], large, small, unknown) == [unknown, small, large]


def test_candidates_come_by_the_improvement_that_each_is_expected_to_bring() -> None:
    source = random.Random(2)
    traced, measured = set(source.sample(legal(), 40)), source.sample(legal(), 4)
    predictor = Foretold(is_traced=traced.__contains__, rate=distorted(0).__getitem__)
    records = [probe(number, each, tokens_per_second(each)) for number, each in enumerate(measured)]
    surrogate = Surrogate(CHOICES, records, LIMIT_BYTES, predictor)
    unknown = [each for each in legal() if each not in measured]
    gains = [surrogate.expected_gain([each], measured) for each in order(predictor, records, *unknown)]
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > 0.01


def distorted(seed: int) -> dict[Candidate, float]:
    """Return predicted rates, off by up to a half for each choice."""
    source = random.Random(seed)
    factors = {item: source.uniform(0.5, 1.5) for candidate in legal() for item in candidate.items()}
    return {each: tokens_per_second(each) * math.prod(factors[item] for item in each.items()) for each in legal()}


def test_wrong_predictions_of_few_candidates_bring_most_searches_to_the_best_within_twelve_probes() -> None:
    """A twelfth of the candidates is traced at first, and none of them near the best."""
    optimum = max(tokens_per_second(each) for each in legal() if peak_bytes(each) <= LIMIT_BYTES)
    far = [each for each in legal() if tokens_per_second(each) < 0.7 * optimum]
    effort = replace(PATIENT, trials=12, patience=12)

    def share(seed: int) -> float:
        traced = set(random.Random(seed).sample(far, len(legal()) // 12))
        predictor = Foretold(rate=distorted(seed).__getitem__, is_traced=traced.__contains__)
        outcome = Run("sqlite://")(ReplayedTable(), effort=effort, seed=seed, predictor=predictor)
        return max(record.tokens_per_second for record in probed(outcome)) / optimum

    shares = [share(seed) for seed in range(6)]
    assert np.median(shares) >= 0.99
    assert min(shares) >= 0.9
