"""A search ends as soon as no remaining candidate is expected to improve the best by 1 %, and not earlier."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autotune.core.candidate import Candidate
from autotune.core.measurement import Measurement
from autotune.core.status import Ending, ProbeStatus
from autotune.study.problem import Purpose, Record
from autotune.study.proposals import Surrogate
from tests.study.foretold import Foretold, legal
from tests.study.replayed import BASELINE, LIMIT_BYTES, ReplayedTable, TableProblem, peak_bytes, tokens_per_second
from tests.study.running import PATIENT, Run, probed

EAGER = replace(PATIENT, trials=60, patience=1)
FITTING = [each for each in legal() if peak_bytes(each) <= LIMIT_BYTES]


def surrogate(predictor: Foretold, *measured: Candidate) -> Surrogate:
    """Return a surrogate that has learnt from probes of some candidates."""
    records = [
        Record(
            number,
            each,
            Purpose.SEARCH,
            Measurement(ProbeStatus.OK, peak_bytes=peak_bytes(each), tokens_per_second=tokens_per_second(each)),
        )
        for number, each in enumerate(measured)
    ]
    return Surrogate(TableProblem().choices, records, LIMIT_BYTES, predictor)


def test_the_expected_gain_is_the_mean_improvement_of_draws_from_what_is_expected() -> None:
    traced, (first, second, other) = set(FITTING[:20]), FITTING[30:33]
    found = surrogate(Foretold(is_traced=traced.__contains__), first, second)
    rate, need = found._rate([other]), found._need([other])
    best = found._rate([first, second]).mean.max()
    source = np.random.default_rng(0)
    rates = source.normal(rate.mean[0], np.hypot(rate.untraced[0], rate.unmeasured[0]), 400_000)
    needs = source.normal(need.mean[0], need.untraced[0], 400_000)
    improvement = np.where(needs <= 0, np.maximum(np.exp(rates - best) - 1, 0), 0)
    assert found.expected_gain([other], [first, second]) == pytest.approx(improvement.mean(), rel=0.02)


def test_nothing_is_gained_by_what_cannot_fit() -> None:
    large = max(legal(), key=peak_bytes)
    found = surrogate(Foretold(rate=lambda each: 1e6 if each == large else 1.0), BASELINE)
    assert found.expected_gain([large], [BASELINE]) == pytest.approx(0)


def test_without_predictions_one_probe_leaves_much_to_gain() -> None:
    found = surrogate(Foretold(is_traced=lambda _: False), BASELINE)
    assert found.expected_gain([each for each in FITTING if each != BASELINE], [BASELINE]) > 0.1


@pytest.mark.parametrize("seed", range(3))
def test_a_search_with_right_predictions_ends_with_the_best_of_the_space_and_most_of_it_unprobed(seed: int) -> None:
    outcome = Run("sqlite://")(ReplayedTable(), effort=EAGER, seed=seed, predictor=Foretold())
    assert outcome.ending is Ending.NO_GAIN
    assert outcome.winner is not None
    assert outcome.winner.measurement.tokens_per_second == max(map(tokens_per_second, FITTING))
    assert len(probed(outcome, Purpose.SEARCH)) < len(FITTING) / 3


def test_the_patience_is_the_number_of_probes_in_a_row_without_an_expected_gain() -> None:
    counts = []
    for patience in (1, 4):
        ended = Run("sqlite://")(ReplayedTable(), effort=replace(EAGER, patience=patience), predictor=Foretold())
        counts.append(len(probed(ended, Purpose.SEARCH)))
    assert counts[1] == counts[0] + 3
