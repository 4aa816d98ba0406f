"""The short runs after a confirmation: their alternation, failures, and records."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from autotune.app.outcome import equally_fast
from autotune.core.candidate import Candidate
from autotune.core.measurement import Measurement, OutOfMemory, Schedule
from autotune.core.program import BACKWARD
from autotune.core.status import ProbeStatus
from autotune.study.comparison import next_turn, pairs
from autotune.study.durations import pair_seconds, short_runs
from autotune.study.judge import Judge, leader
from autotune.study.problem import ComparisonTurn, ProbeRun, Purpose, Record, SearchOutcome, ShortRun
from tests.study.killed import kill_in_the_middle
from tests.study.replayed import BASELINE, ReplayedTable, TableProblem, measurement, tokens_per_second
from tests.study.running import PATIENT, Now, Run

GOOD = BASELINE.but(attention="flash", packing="bfd", liger="on")
NEXT = GOOD.but(liger="off")
RAN_OUT = Measurement(ProbeStatus.OUT_OF_MEMORY, "in backward", out_of_memory=OutOfMemory(BACKWARD, 1, 1, 1))
EFFORT = replace(PATIENT, comparisons=3)
TURNS = [(1, 0), (0, 0), (0, 1), (1, 1), (1, 2), (0, 2)]


def rate(tokens_per_second: float) -> Measurement:
    return Measurement(ProbeStatus.OK, peak_bytes=10, tokens_per_second=tokens_per_second)


@dataclass
class Varied(ReplayedTable):
    """Shows other rates in short runs, or a failure in one of them.

    Attributes:
        rates: by candidate, those of its short runs, one after another.
        failing: the turns that fail.
    """

    rates: dict[Candidate, Iterator[float]] = field(default_factory=dict)
    failing: frozenset[ComparisonTurn] = frozenset()

    def __call__(self, run: ProbeRun, seconds_left: float | None) -> Measurement:
        """Answer."""
        shown = super().__call__(run, seconds_left)
        if run.turn is None:
            return shown
        if run.turn in self.failing:
            return RAN_OUT
        return rate(next(self.rates[run.candidate])) if run.candidate in self.rates else shown


@pytest.fixture
def recipes(run: Run) -> Run:
    """A search that probes the baseline as trial 0, the winner as trial 1 and the next best as trial 2."""
    run.problem.recipes = (GOOD, NEXT)
    return run


def turns(table: ReplayedTable, winner: int = 1) -> list[tuple[int, int]]:
    """Return trial and pair of each run of a winner's comparison."""
    return [(run.turn.number, run.turn.pair) for run in table.runs if run.turn and run.turn.winner == winner]


def winner_of(outcome: SearchOutcome) -> Record:
    assert outcome.winner is not None
    return outcome.winner


def short(number: int, *rates: float) -> tuple[ShortRun, ...]:
    return tuple(ShortRun(number, rate(value)) for value in rates)


def record(number: int, probe: float, confirmation: float | None = None, *short_rates: float) -> Record:
    return Record(
        number,
        BASELINE.but(batch=2**number),
        Purpose.SEARCH,
        rate(probe),
        None if confirmation is None else rate(confirmation),
        comparison=short(number, *short_rates),
    )


def test_winner_and_baseline_take_turns_and_alternate_who_goes_first(recipes: Run) -> None:
    table = ReplayedTable()
    outcome = recipes(table, trials=5, effort=EFFORT)
    assert turns(table) == TURNS
    assert [run.number for run in winner_of(outcome).comparison] == [number for number, _ in TURNS]
    compared = [run for run in table.runs if run.turn]
    assert {run.schedule for run in compared} == {EFFORT.comparison}
    assert {run.purpose for run in compared} == {Purpose.COMPARISON}


def test_the_turns_come_after_the_confirmation_and_before_the_attribution(recipes: Run) -> None:
    table = ReplayedTable()
    recipes(table, trials=5, effort=EFFORT)
    purposes = [purpose for purpose, _ in itertools.groupby(run.purpose for run in table.runs)]
    assert purposes[-3:] == [Purpose.CONFIRMATION, Purpose.COMPARISON, Purpose.CONTRIBUTION]


def test_beside_a_baseline_that_does_not_fit_the_winner_runs_alone(recipes: Run) -> None:
    table = ReplayedTable(shown={BASELINE: RAN_OUT})
    assert winner_of(recipes(table, trials=5, effort=EFFORT)).number == 1
    assert turns(table) == [(1, 0), (1, 1), (1, 2)]


def test_a_baseline_that_wins_runs_alone(run: Run) -> None:
    table = ReplayedTable(shown={BASELINE: rate(1e9)})
    outcome = run(table, trials=4, effort=EFFORT)
    assert turns(table, winner=0) == [(0, 0), (0, 1), (0, 2)]
    assert pairs(winner_of(outcome)) == ()


@pytest.mark.parametrize("pair", [0, 2])
def test_a_short_run_of_the_winner_that_fails_fails_its_confirmation(recipes: Run, pair: int) -> None:
    table = Varied(failing=frozenset({ComparisonTurn(1, 1, pair)}))
    outcome = recipes(table, trials=5, effort=EFFORT)
    (failed,) = outcome.failed_confirmations
    assert (failed.candidate, failed.failure, failed.confirmed) == (GOOD, RAN_OUT, False)
    assert winner_of(outcome).candidate == NEXT
    assert outcome.confirmed
    assert turns(table, winner=2) == [(2 if number else 0, pair) for number, pair in TURNS]


def test_a_baseline_that_fails_in_a_short_run_has_no_more_of_them(recipes: Run) -> None:
    table = Varied(failing=frozenset({ComparisonTurn(1, 0, 1)}))
    outcome = recipes(table, trials=5, effort=EFFORT)
    assert turns(table) == [(1, 0), (0, 0), (0, 1), (1, 1), (1, 2)]
    assert winner_of(outcome).confirmed
    assert len(pairs(winner_of(outcome))) == 1


def test_a_baseline_that_failed_beside_a_winner_is_not_recommended_when_that_winner_fails_too(run: Run) -> None:
    run.problem.recipes = (GOOD,)
    table = Varied(failing=frozenset({ComparisonTurn(1, 0, 0), ComparisonTurn(1, 1, 2)}))
    outcome = run(table, trials=2, effort=EFFORT)
    assert turns(table) == [(1, 0), (0, 0), (1, 1), (1, 2)]
    assert (outcome.winner, outcome.confirmed) == (None, False)
    assert [failed.candidate for failed in outcome.failed_confirmations] == [BASELINE, GOOD]


def test_pairs_are_the_runs_that_stand_beside_each_other() -> None:
    runs = (*short(1, 300), *short(0, 100), *short(0, 110), *short(1, 320), *short(1, 310))
    found = pairs(replace(record(1, 290), comparison=runs))
    assert [(ours.tokens_per_second, theirs.tokens_per_second) for ours, theirs in found] == [(300, 100), (320, 110)]


def test_a_comparison_is_complete_when_both_had_their_runs() -> None:
    baseline, winner = record(0, 100), record(1, 300)
    seen = []
    while (turn := next_turn(winner, baseline, 3)) is not None:
        seen.append((turn.number, turn.pair))
        winner = replace(winner, comparison=(*winner.comparison, *short(turn.number, 1)))
    assert seen == TURNS
    assert next_turn(winner, baseline, 2) is None


@pytest.mark.parametrize(("spread", "runs"), [(0.01, 3), (0.3, 6)])
def test_runs_that_scatter_are_followed_by_up_to_as_many_more(recipes: Run, spread: float, runs: int) -> None:
    """The range of the first two is wide, of the first three narrow or still wide."""
    usual = tokens_per_second(GOOD)
    rates = itertools.cycle([usual, (1 - spread) * usual])
    table = Varied(rates={GOOD: rates})
    recipes(table, trials=5, effort=EFFORT)
    assert sum(number == 1 for number, _ in turns(table)) == runs


def test_further_runs_end_when_the_range_is_narrow(recipes: Run) -> None:
    usual = tokens_per_second(GOOD)
    table = Varied(rates={GOOD: itertools.chain([0.9 * usual], itertools.repeat(usual))})
    outcome = recipes(table, trials=5, effort=EFFORT)
    assert [pair for number, pair in turns(table) if number == 1] == [0, 1, 2, 3]
    expected = winner_of(outcome).prediction_interval
    assert expected is not None
    assert expected.high <= 1.15 * winner_of(outcome).tokens_per_second


def test_the_rate_of_a_winner_is_the_mean_of_its_runs_after_the_probe() -> None:
    assert record(1, 900, 100, 200, 400).tokens_per_second == pytest.approx(200)
    assert record(1, 900).tokens_per_second == 900


def test_a_rate_that_further_runs_may_reach_is_no_reason_to_confirm_another() -> None:
    judge = Judge(TableProblem())
    scattered, steady = record(1, 600, 448, 763, 520, 670), record(1, 600, 590, 592, 594, 588)
    other = record(2, 700)
    assert leader([scattered, other], judge) == scattered
    assert leader([steady, other], judge) == other
    assert leader([steady, replace(other, confirmation=rate(580))], judge) == steady
    assert leader([steady, replace(other, confirmation=rate(700))], judge, confirm_more=False) is not steady


def test_a_winner_that_disappoints_in_its_short_runs_gives_way_to_one_with_turns_of_its_own(recipes: Run) -> None:
    slow = tokens_per_second(NEXT) * 0.5
    table = Varied(rates={GOOD: itertools.repeat(slow)}, shown={(GOOD, EFFORT.confirmation): rate(slow)})
    outcome = recipes(table, trials=5, effort=EFFORT)
    assert winner_of(outcome).candidate == NEXT
    assert turns(table, winner=2) == [(2 if number else 0, pair) for number, pair in TURNS]


def test_no_two_runs_of_a_search_are_the_same(recipes: Run) -> None:
    table = Varied(failing=frozenset({ComparisonTurn(1, 1, 2)}))
    recipes(table, effort=EFFORT)
    assert len({(run.number, run.purpose, run.turn) for run in table.runs}) == len(table.runs)


def test_the_time_limit_ends_a_comparison_and_what_there_is_of_it_counts(durable: Run, now: Now) -> None:
    durable.problem.recipes = (GOOD,)

    def hanging(run: ProbeRun, seconds_left: float | None) -> Measurement:
        if run.turn is None or run.turn.pair == 0:
            return measurement(run.candidate)
        now.seconds += seconds_left or 0
        return Measurement(ProbeStatus.TIMEOUT, "took too long")

    outcome = durable(hanging, trials=2, effort=EFFORT, timeout_seconds=3.0)
    winner = winner_of(outcome)
    assert outcome.confirmed
    assert (len(winner.comparison), len(winner.rates), len(pairs(winner))) == (2, 2, 1)
    table = ReplayedTable()
    durable(table, trials=2, effort=EFFORT, resume=True)
    assert turns(table) == TURNS[2:]


@pytest.mark.usefixtures("now")
def test_the_search_leaves_the_time_that_confirmation_and_comparison_need(run: Run) -> None:
    def clocked(candidate: Candidate) -> Measurement:
        shown = replace(measurement(candidate), wall_seconds=8.0, step_seconds=2.0)
        return replace(shown, micro_batches_timed=10, micro_batch_seconds=0.5)

    limits: list[float | None] = []

    def probe(run: ProbeRun, seconds_left: float | None) -> Measurement:
        limits.append(seconds_left)
        return clocked(run.candidate)

    run.problem.recipes = (GOOD,)
    run(probe, trials=2, effort=EFFORT, timeout_seconds=1000.0)
    # A further run takes as long as a probe, and the confirmation beside that its timed steps. Of the two that are
    # compared, TRL's default alone is known by then.
    settling = (8 + EFFORT.confirmation.max_seconds) + 3 * 8
    assert limits[1] == pytest.approx(1000 - settling)


@pytest.mark.parametrize("runs_done", [0, 5, *(pytest.param(done, marks=pytest.mark.nightly) for done in (1, 2, 9))])
def test_a_kill_during_a_comparison_repeats_the_run_that_it_killed_and_no_other(
    run: Run, durable: Run, tmp_path: Path, runs_done: int
) -> None:
    undisturbed = ReplayedTable()
    expected = run(undisturbed)
    first = [item.purpose for item in undisturbed.runs].index(Purpose.COMPARISON)
    begun = kill_in_the_middle(durable.url, tmp_path / "log", first + runs_done + 1)
    assert begun[-1].endswith("comparison")
    table = ReplayedTable()
    outcome = durable(table, resume=True)
    assert table.runs == undisturbed.runs[first + runs_done :]
    assert winner_of(outcome).comparison == winner_of(expected).comparison


def test_short_runs_are_read_back_as_they_were(durable: Run) -> None:
    usual = tokens_per_second(GOOD)
    rates: dict[Candidate, Iterator[float]] = {
        GOOD: itertools.count(usual, 7.0),
        BASELINE: itertools.count(2000.0, 3.0),
    }
    durable.problem.recipes = (GOOD,)
    first = durable(Varied(rates=rates), trials=2, effort=EFFORT)
    again = durable(ReplayedTable(), trials=2, effort=EFFORT, resume=True)
    assert winner_of(again).comparison == winner_of(first).comparison
    assert [run.measurement.tokens_per_second for run in winner_of(again).comparison] == [
        usual, 2000.0, 2003.0, usual + 7, usual + 14, 2006.0,
    ]  # fmt: skip


def test_a_study_without_short_runs_gets_them_when_it_is_resumed(durable: Run) -> None:
    durable.problem.recipes = (GOOD,)
    durable(ReplayedTable(), trials=2, effort=replace(EFFORT, comparisons=0))
    table = ReplayedTable()
    outcome = durable(table, trials=2, effort=EFFORT, resume=True)
    assert turns(table) == TURNS
    assert outcome.confirmed
    assert winner_of(outcome).confirmation == measurement(GOOD)


def test_a_change_back_is_told_apart_only_beyond_the_spread_between_runs(recipes: Run) -> None:
    steady = recipes(ReplayedTable(), trials=6, effort=EFFORT)
    by_knob = {item.knob: item.significant for item in steady.contributions}
    assert by_knob == {"attention": None, "packing": True, "liger": True}
    scattered = Varied(rates={GOOD: itertools.cycle([3000.0, 5000.0, 4000.0])})
    outcome = Run("sqlite://", recipes.problem)(scattered, trials=6, effort=EFFORT)
    assert winner_of(outcome).candidate == GOOD
    assert {item.knob: item.significant for item in outcome.contributions}["liger"] is False


def test_a_choice_without_effect_is_not_credited_with_the_winners_lucky_probe(recipes: Run) -> None:
    true_rate = tokens_per_second(NEXT)
    shown: dict[Candidate | tuple[Candidate, Schedule], Measurement] = {(GOOD, EFFORT.confirmation): rate(true_rate)}
    rates = {GOOD: iter([0.98 * true_rate, 1.02 * true_rate, true_rate])}
    outcome = recipes(Varied(shown=shown, rates=rates), trials=6, effort=EFFORT)
    assert winner_of(outcome).candidate == GOOD
    by_knob = {item.knob: item for item in outcome.contributions}
    assert by_knob["liger"].speedup == pytest.approx(1.0, abs=0.001)
    assert by_knob["liger"].significant is False
    assert by_knob["liger"].number in {record.number for record in equally_fast(outcome)}


def test_short_runs_are_fewer_where_they_take_long_and_at_least_two() -> None:
    def after(pair: float, probing: float = 0.0, limit_seconds: float | None = None) -> int:
        shown = replace(rate(1.0), wall_seconds=probing)
        records = [Record(0, GOOD, Purpose.SEARCH, shown), Record(1, NEXT, Purpose.CONTRIBUTION, shown)]
        return short_runs(pair, records, 5, limit_seconds)

    assert [after(pair) for pair in (0.0, 12.0, 60.0, 100.0, 1200.0)] == [5, 5, 5, 3, 2]
    assert after(1200.0, probing=9600.0) == 4
    assert [after(12.0, limit_seconds=limit) for limit in (60.0, 110.0, 240.0, 9000.0)] == [2, 3, 5, 5]


def test_a_slow_baseline_makes_a_pair_long() -> None:
    winner, baseline = (replace(rate(1000.0), wall_seconds=seconds) for seconds in (3.0, 19.0))
    records = Record(1, GOOD, Purpose.SEARCH, winner), Record(0, BASELINE, Purpose.BASELINE, baseline)
    assert pair_seconds(*records) == 3 + 19
    assert pair_seconds(records[1], records[1]) == 19
    assert pair_seconds(records[0], replace(records[1], measurement=RAN_OUT)) == 3
