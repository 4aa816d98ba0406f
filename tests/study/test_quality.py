"""The distance of a search's result from the optimum of the replayed table, and its out-of-memory probes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from autotune.study.problem import SearchOutcome
from tests.study.replayed import LIMIT_BYTES, ReplayedTable, TableProblem, peak_bytes, tokens_per_second
from tests.study.running import PATIENT, Run, probed

SEEDS = range(10)
PROBES = 24


@pytest.fixture(scope="module")
def outcomes() -> list[SearchOutcome]:
    """A whole search for each seed, from a baseline at a third of the optimum's rate and without recipes."""
    effort = replace(PATIENT, trials=PROBES, patience=PROBES)
    return [Run("sqlite://")(ReplayedTable(), effort=effort, seed=seed) for seed in SEEDS]


@pytest.fixture(scope="module")
def plans() -> list[tuple[float, int]]:
    """Token rate and peak of each of the table's 120 legal plans."""
    problem = TableProblem()
    legal = [candidate for candidate in problem.everything() if problem.illegal(candidate) is None]
    distinct = {problem.identity(candidate): candidate for candidate in legal}
    return [(tokens_per_second(candidate), peak_bytes(candidate)) for candidate in distinct.values()]


def test_most_searches_come_within_five_percent_of_the_optimum(
    outcomes: list[SearchOutcome], plans: list[tuple[float, int]]
) -> None:
    assert len(plans) == 120
    optimum = max(rate for rate, peak in plans if peak <= LIMIT_BYTES)
    found = [outcome.winner.tokens_per_second if outcome.winner else 0.0 for outcome in outcomes]
    assert sum(rate >= 0.95 * optimum for rate in found) >= 8


def test_fewer_probes_run_out_of_memory_than_by_chance(
    outcomes: list[SearchOutcome], plans: list[tuple[float, int]]
) -> None:
    ours = [sum(not record.measurement.ok for record in probed(outcome)) for outcome in outcomes]
    by_chance = [sum(peak > LIMIT_BYTES for _, peak in random.Random(seed).sample(plans, PROBES)) for seed in SEEDS]
    assert sum(ours) < 0.75 * sum(by_chance)
