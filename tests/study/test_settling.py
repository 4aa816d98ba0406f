"""The choice of the winner, the contributions of its choices, and its confirmation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.core.candidate import Candidate
from autotune.core.measurement import Measurement
from autotune.core.status import ProbeStatus
from autotune.study.judge import Judge, fastest, leader
from autotune.study.problem import ProbeRun, Purpose, Record
from tests.study.replayed import BASELINE, ReplayedTable, TableProblem, measurement, peak_bytes, tokens_per_second
from tests.study.running import PATIENT, Now, Run, probed

GOOD = BASELINE.but(attention="flash", packing="bfd", liger="on")
NEXT = GOOD.but(liger="off")
CRASH = Measurement(ProbeStatus.CRASHED, "signal 9")


def rate(tokens_per_second: float, peak: int = 10) -> Measurement:
    return Measurement(ProbeStatus.OK, peak_bytes=peak, tokens_per_second=tokens_per_second)


def record(number: int, shown: Measurement, purpose: Purpose = Purpose.SEARCH) -> Record:
    return Record(number, BASELINE.but(batch=2**number), purpose, shown)


@pytest.fixture
def recipes(run: Run) -> Run:
    """A search that probes the baseline and two recipes, and has two probes left for contributions."""
    run.problem.recipes = (GOOD, NEXT)
    return run


def confirmed_numbers(table: ReplayedTable) -> list[int]:
    return [number for number, _, schedule in table.calls if schedule == PATIENT.confirmation]


def test_the_fastest_wins_and_among_equally_fast_ones_the_smallest() -> None:
    slow, large, small = record(0, rate(90, 1)), record(1, rate(100, 50)), record(2, rate(99.5, 20))
    assert fastest([slow, large, small]) == small
    assert fastest([slow, large]) == large
    assert fastest([]) is None


def on_gpu(tokens_per_second: float, allocated: int, held: int) -> Measurement:
    return replace(rate(tokens_per_second, allocated), reserved_bytes=held - 5, device_bytes=held)


def test_among_equally_fast_ones_on_a_gpu_what_the_budget_has_to_hold_decides() -> None:
    """The allocator's settings change reserved memory alone."""
    fragmented, expandable = record(1, on_gpu(100, 200, 260)), record(2, on_gpu(99.9, 201, 205))
    assert fastest([fragmented, expandable]) == expandable


def test_the_winner_alone_is_run_again_longer(recipes: Run) -> None:
    table = ReplayedTable()
    outcome = recipes(table, trials=5)
    assert outcome.winner is not None
    assert outcome.winner.candidate == GOOD
    assert confirmed_numbers(table) == [outcome.winner.number]
    assert outcome.confirmed
    assert outcome.winner.confirmation == measurement(GOOD)


def test_a_candidate_whose_probe_took_long_is_expected_to_take_as_long_in_its_longer_runs(recipes: Run) -> None:
    table = ReplayedTable(shown={GOOD: replace(measurement(GOOD), wall_seconds=540.0, step_seconds=20.0)})
    recipes(table, trials=5)
    # As long as the probe, and four whole steps.
    expected = {(run.purpose, run.expected_seconds) for run in table.runs if run.candidate == GOOD}
    assert expected >= {(Purpose.CONFIRMATION, 620.0), (Purpose.COMPARISON, 620.0)}


def test_a_baseline_that_wins_is_confirmed_once(run: Run) -> None:
    table = ReplayedTable(shown={BASELINE: rate(1e9)})
    outcome = run(table, trials=4)
    assert outcome.winner == outcome.baseline
    assert confirmed_numbers(table) == [0]
    assert (outcome.confirmed, outcome.contributions) == (True, ())


def test_a_winner_whose_confirmation_fails_gives_way_to_the_next(recipes: Run) -> None:
    table = ReplayedTable(shown={(GOOD, PATIENT.confirmation): CRASH})
    outcome = recipes(table, trials=5)
    assert [failed.candidate for failed in outcome.failed_confirmations] == [GOOD]
    assert outcome.failed_confirmations[0].confirmation == CRASH
    assert outcome.winner is not None
    assert outcome.winner.candidate == NEXT
    assert outcome.confirmed


def test_nothing_is_recommended_when_every_confirmation_fails(run: Run) -> None:
    table = ReplayedTable(shown={(BASELINE, PATIENT.confirmation): CRASH})
    outcome = run(table, trials=1)
    assert (outcome.winner, outcome.confirmed) == (None, False)
    assert [failed.number for failed in outcome.failed_confirmations] == [0]


def test_probes_that_were_kept_for_a_winner_that_fails_are_spent_on_the_search(run: Run) -> None:
    run.problem.recipes = (GOOD,)
    table = ReplayedTable(shown={BASELINE: CRASH, (GOOD, PATIENT.confirmation): CRASH})
    outcome = run(table, trials=4)
    assert [failed.candidate for failed in outcome.failed_confirmations] == [GOOD]
    assert len(probed(outcome)) == 4
    assert outcome.winner is not None
    assert outcome.confirmed


def test_a_disappointing_confirmation_has_the_next_best_confirmed_and_the_better_taken(recipes: Run) -> None:
    slower = rate(tokens_per_second(NEXT) * 0.9)
    table = ReplayedTable(shown={(GOOD, PATIENT.confirmation): slower})
    outcome = recipes(table, trials=5)
    assert outcome.winner is not None
    assert outcome.winner.candidate == NEXT
    assert outcome.failed_confirmations == ()


def test_a_confirmed_one_is_recommended_where_no_time_is_left_to_confirm_another(recipes: Run, now: Now) -> None:
    class UntilTheEnd(ReplayedTable):
        def __call__(self, run: ProbeRun, seconds_left: float | None) -> Measurement:
            now.seconds = 100.0 if run.purpose is Purpose.CONFIRMATION else now.seconds
            return super().__call__(run, seconds_left)

    disappointing = rate(tokens_per_second(NEXT) * 0.5)
    outcome = recipes(UntilTheEnd(shown={(GOOD, PATIENT.confirmation): disappointing}), trials=5, timeout_seconds=100.0)
    assert outcome.winner is not None
    assert (outcome.winner.candidate, outcome.confirmed) == (GOOD, True)


def test_a_confirmation_within_three_percent_of_the_next_best_settles_it(recipes: Run) -> None:
    table = ReplayedTable(shown={(GOOD, PATIENT.confirmation): rate(tokens_per_second(NEXT) * 0.98)})
    outcome = recipes(table, trials=5)
    assert outcome.winner is not None
    assert outcome.winner.candidate == GOOD
    assert NEXT not in [item for _, item, schedule in table.calls if schedule == PATIENT.confirmation]


def test_at_most_three_candidates_are_confirmed_for_disappointment(run: Run) -> None:
    table = ReplayedTable()
    table.shown.update({(item, PATIENT.confirmation): rate(1.0) for item in run.problem.everything()})
    # With this seed, four candidates that fit are faster than the baseline.
    outcome = run(table, seed=1)
    assert len([number for number in confirmed_numbers(table) if number != 0]) == 3
    assert outcome.confirmed


def test_each_choice_of_the_winner_is_changed_back_and_compared(recipes: Run) -> None:
    outcome = recipes(ReplayedTable(), trials=6)
    by_knob = {contribution.knob: contribution for contribution in outcome.contributions}
    assert by_knob.keys() == {"attention", "packing", "liger"}
    liger = by_knob["liger"]
    assert (liger.choice, liger.instead_of, liger.status) == ("on", "off", ProbeStatus.OK)
    assert liger.speedup == pytest.approx(1.08)
    assert liger.peak_bytes_saved == peak_bytes(NEXT) - peak_bytes(GOOD)
    assert by_knob["packing"].speedup == pytest.approx(1.6)
    # bfd with sdpa is illegal.
    attention = by_knob["attention"]
    assert (attention.status, attention.number, attention.speedup) == (ProbeStatus.VETOED, None, None)
    assert attention.reason == "packing needs flash attention"


@pytest.mark.parametrize(("changed_back", "saved"), [(6000, 3500), (2200, 0), (1500, -500)])
def test_a_choice_saves_what_is_beyond_the_memory_of_the_winners_runs(
    recipes: Run, changed_back: int, saved: int
) -> None:
    """The winner holds 2,000 bytes in its probe and 2,500 in its longer run."""
    table = ReplayedTable(
        shown={
            GOOD: replace(measurement(GOOD), device_bytes=2000),
            (GOOD, PATIENT.confirmation): replace(measurement(GOOD), device_bytes=2500),
            NEXT: replace(measurement(NEXT), reserved_bytes=1000, device_bytes=changed_back),
        }
    )
    liger = next(item for item in recipes(table, trials=6).contributions if item.knob == "liger")
    assert liger.peak_bytes_saved == saved


def test_a_change_back_that_was_probed_already_is_not_probed_again(recipes: Run) -> None:
    outcome = recipes(ReplayedTable(), trials=6)
    liger = next(item for item in outcome.contributions if item.knob == "liger")
    assert liger.number == 2
    assert [item.candidate for item in probed(outcome, Purpose.CONTRIBUTION)].count(NEXT) == 0


@pytest.mark.parametrize(("longer", "status"), [(0.5, ProbeStatus.OK), (None, ProbeStatus.CRASHED)])
def test_a_change_back_that_ran_again_is_compared_by_that(
    longer: float | None, status: ProbeStatus, recipes: Run
) -> None:
    probe = tokens_per_second(NEXT)
    again = CRASH if longer is None else rate(longer * probe)
    table = ReplayedTable(shown={(GOOD, PATIENT.confirmation): rate(0.9 * probe), (NEXT, PATIENT.confirmation): again})
    outcome = recipes(table, trials=6)
    assert outcome.winner is not None
    assert outcome.winner.candidate == GOOD
    liger = next(item for item in outcome.contributions if item.knob == "liger")
    expected = None if longer is None else pytest.approx(outcome.winner.tokens_per_second / (longer * probe))
    assert (liger.number, liger.status, liger.speedup) == (2, status, expected)


def test_a_change_back_that_does_not_fit_says_so(run: Run) -> None:
    tight = BASELINE.but(checkpointing="on", batch=16, attention="flash", liger="on")
    run.problem.recipes = (tight,)
    run.problem.memory_ordered = frozenset()
    run.problem.baseline = BASELINE.but(batch=4)
    table = ReplayedTable(shown={tight: rate(1e6, 600)})
    outcome = run(table, trials=6)
    attention = next(item for item in outcome.contributions if item.knob == "attention")
    assert attention.status == ProbeStatus.OUT_OF_MEMORY
    assert (attention.speedup, attention.peak_bytes_saved) == (None, None)
    assert "needs" in attention.reason


def test_what_the_limit_left_unmeasured_is_reported_as_that(recipes: Run) -> None:
    outcome = recipes(ReplayedTable(shown={GOOD: rate(1e6)}), trials=2)
    liger = next(item for item in outcome.contributions if item.knob == "liger")
    assert (liger.status, liger.number, liger.speedup) == (ProbeStatus.VETOED, None, None)
    assert liger.reason == "the limit of probes or of time was reached"


def test_a_change_back_that_is_faster_becomes_the_winner(run: Run) -> None:
    # Liger slows this one down, which only its change back shows.
    run.problem.fixed = {"packing": "none", "attention": "sdpa", "batch": 8, "checkpointing": "on"}
    run.problem.forbidden = {}
    lucky = BASELINE.but(liger="on", batch=4)
    run.problem.recipes = (lucky,)
    better = BASELINE.but(liger="off", batch=4)
    table = ReplayedTable(shown={lucky: rate(10_000.0), better: rate(11_000.0)})
    outcome = run(table, trials=4)
    assert outcome.winner is not None
    assert outcome.winner.candidate == better
    assert next(item.purpose for item in outcome.records if item.candidate == better) == Purpose.CONTRIBUTION
    assert [contribution.knob for contribution in outcome.contributions] == ["batch"]


def test_one_whose_confirmation_failed_never_leads() -> None:
    first, second = record(0, rate(100)), record(1, rate(50))
    judge = Judge(TableProblem())
    assert leader([first, second], judge) == first
    assert leader([replace(first, confirmation=CRASH), second], judge) == second


def test_candidates_that_come_to_one_plan_share_a_record() -> None:
    judge = Judge(TableProblem())
    packed = Candidate({**GOOD, "packing": "bfd"})
    shown = Record(3, packed, Purpose.SEARCH, rate(1))
    judge.learn(shown)
    assert judge.record_for(packed.but(packing="bfd_split")) == shown
    assert judge.record_for(packed.but(packing="none")) is None
