"""The probes and vetoes of a search, and its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest

from autotune.core.candidate import Candidate, Choice
from autotune.core.events import CandidateVetoed, ProbeFinished, ProbeStarted
from autotune.core.measurement import Measurement, OutOfMemory
from autotune.core.prediction import Predictor
from autotune.core.program import FORWARD
from autotune.core.status import Ending, ProbeStatus
from autotune.study.problem import ProbeRun, Purpose, Record
from autotune.study.proposals import Surrogate
from tests.study.replayed import BASELINE, LIMIT_BYTES, ReplayedTable, TableProblem, measurement, tokens_per_second
from tests.study.running import PATIENT, Now, Run, probed


def test_the_baseline_comes_first_and_the_recipes_next(run: Run) -> None:
    recipe, illegal = BASELINE.but(attention="flash", packing="bfd"), BASELINE.but(packing="bfd")
    run.problem.recipes = (illegal, recipe)
    outcome = run(ReplayedTable(), trials=4)
    assert [record.candidate for record in outcome.records[:3]] == [BASELINE, illegal, recipe]
    assert [record.measurement.status for record in outcome.records[:3]] == ["ok", "vetoed", "ok"]
    assert outcome.records[1].measurement.reason == "packing needs flash attention"


def test_no_plan_is_probed_twice_except_to_confirm_it(run: Run) -> None:
    table = ReplayedTable()
    run(table)
    probes = [(item, replace(schedule, rate_to_beat=None)) for _, item, schedule in table.calls]
    searched = [run.problem.identity(item) for item, schedule in probes if schedule == PATIENT.probe]
    assert len(searched) == len(set(searched)) == 9


def test_no_illegal_candidate_is_probed(run: Run) -> None:
    table = ReplayedTable()
    run(table)
    assert [item for _, item, _ in table.calls if run.problem.illegal(item)] == []


def test_trials_limit_the_probes_with_contributions_and_without_confirmations(run: Run) -> None:
    table = ReplayedTable()
    outcome = run(table, trials=7)
    assert len(probed(outcome)) == 7
    assert len(table.calls) > 7
    assert probed(outcome, Purpose.CONTRIBUTION) or not outcome.contributions
    assert outcome.confirmed


def test_a_search_that_found_nothing_yet_goes_on(run: Run) -> None:
    run.problem = TableProblem(memory_ordered=frozenset())
    outcome = run(ReplayedTable(limit_bytes=0), effort=replace(PATIENT, patience=1))
    assert len(probed(outcome)) == 9


def test_an_exhausted_space_ends_the_search(run: Run) -> None:
    kept = {"attention": "flash", "packing": "none", "liger": "off"}
    run.problem.forbidden = {"batch": 16}
    run.problem.fixed = kept
    run.problem.baseline = BASELINE.but(**kept)
    outcome = run(ReplayedTable(limit_bytes=100_000))
    assert len(probed(outcome)) == 4 * 2
    assert outcome.winner is not None
    assert outcome.winner.candidate == run.problem.baseline.but(checkpointing="off")


SWITCHES = tuple(f"switch{number}" for number in range(11))
OFF = BASELINE.but(**dict.fromkeys(SWITCHES, "off"))
FAR = BASELINE.but(**{knob: "on" if number % 2 else "off" for number, knob in enumerate(SWITCHES)})


@dataclass
class Sparse(TableProblem):
    """2,048 candidates, of which few are legal."""

    baseline: Candidate = OFF
    legal: tuple[Candidate, ...] = (OFF, FAR)

    @property
    def choices(self) -> Mapping[str, tuple[Choice, ...]]:
        """The switches, and one choice of all other knobs."""
        return {knob: ("off", "on") if knob in SWITCHES else (choice,) for knob, choice in OFF.items()}

    def illegal(self, candidate: Candidate) -> str | None:
        """Return why a candidate is illegal."""
        return None if candidate in self.legal else "the switches are wrong"


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2, 3))])
def test_no_candidate_is_left_when_a_search_says_so(seed: int) -> None:
    outcome = Run("sqlite://", Sparse())(ReplayedTable(), seed=seed)
    assert outcome.ending is Ending.EXHAUSTED
    assert [record.candidate for record in probed(outcome)] == [OFF, FAR]


def test_a_search_that_finds_no_candidate_in_a_sample_of_its_space_does_not_say_that_none_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("autotune.study.proposals._MAX_EXAMINED", 1000)
    outcome = Run("sqlite://", Sparse(legal=(OFF,)))(ReplayedTable())
    assert outcome.ending is Ending.SAMPLED
    assert [record.candidate for record in probed(outcome)] == [OFF]


def test_running_out_of_memory_vetoes_the_same_with_a_larger_batch(run: Run) -> None:
    small, large = BASELINE.but(attention="eager", batch=8), BASELINE.but(attention="eager", batch=16)
    run.problem.recipes = (small, large)
    outcome = run(ReplayedTable(), trials=3)
    assert outcome.records[1].measurement.status == ProbeStatus.OUT_OF_MEMORY
    vetoed = outcome.records[2]
    assert (vetoed.candidate, vetoed.measurement.status) == (large, ProbeStatus.VETOED)
    assert "probe 1 ran out of memory" in vetoed.measurement.reason
    assert "batch 8 → 16" in vetoed.measurement.reason


def test_a_probe_that_took_too_long_vetoes_the_same_with_a_larger_batch_and_nothing_else(run: Run) -> None:
    killed = Measurement(ProbeStatus.TIMEOUT, "killed after 5 min", wall_seconds=300.0)
    slow, larger = BASELINE.but(batch=2), BASELINE.but(batch=4)
    others = [slow.but(batch=1), larger.but(attention="flash"), slow.but(checkpointing="off")]
    run.problem.recipes = (slow, larger, *others)
    table = ReplayedTable(shown={slow: killed})
    outcome = run(table, trials=5)
    vetoed = outcome.records[2]
    assert (vetoed.candidate, vetoed.measurement.status) == (larger, ProbeStatus.VETOED)
    assert vetoed.measurement.reason == (
        "probe 1 was killed after 5 min, and this never takes less time: batch 2 → 4, all else equal"
    )
    assert [item for _, item, _ in table.calls[1:5]] == [slow, *others]


def test_after_a_probe_that_took_too_long_smaller_micro_batches_come_first(run: Run) -> None:
    killed = Measurement(ProbeStatus.TIMEOUT, "killed after 5 min")
    large, small = BASELINE.but(checkpointing="off"), BASELINE.but(batch=4)
    run.problem.recipes = (large, small)
    table = ReplayedTable(shown={BASELINE: killed})
    outcome = run(table, trials=8)
    assert probed(outcome)[1].candidate == small
    assert {record.candidate["batch"] for record in probed(outcome, Purpose.SEARCH)} <= {1, 2, 4}
    assert outcome.winner is not None


def test_where_micro_batches_as_large_ended_in_time_one_that_took_too_long_says_nothing_of_their_size(run: Run) -> None:
    killed = Measurement(ProbeStatus.TIMEOUT, "killed after 5 min")
    slow, other = BASELINE.but(packing="wrapped"), BASELINE.but(liger="on")
    run.problem.recipes = (slow, other)
    table = ReplayedTable(shown={slow: killed})
    run(table, trials=3)
    assert table.calls[2][1] == other


def test_words_and_numbers_of_a_knob_that_takes_longer_do_not_compare(run: Run) -> None:
    run.problem.time_ordered = frozenset({"checkpointing"})
    killed = Measurement(ProbeStatus.TIMEOUT, "killed after 5 min")
    run.problem.recipes = (BASELINE.but(batch=2), BASELINE.but(batch=4), BASELINE.but(batch=2, checkpointing="off"))
    table = ReplayedTable(shown={run.problem.recipes[0]: killed})
    run(table, trials=4)
    assert [item for _, item, _ in table.calls[1:4]] == [*run.problem.recipes]


def test_a_smaller_batch_or_another_knob_is_not_vetoed_by_running_out_of_memory(run: Run) -> None:
    failing = BASELINE.but(attention="eager", batch=8)
    others = [failing.but(batch=4), failing.but(batch=16, attention="flash")]
    run.problem.recipes = (failing, *others)
    table = ReplayedTable()
    run(table, trials=4)
    assert [item for _, item, _ in table.calls[2:4]] == others


def test_words_and_numbers_of_an_ordered_knob_do_not_compare(run: Run) -> None:
    run.problem.memory_ordered = frozenset({"batch", "checkpointing"})
    run.problem.recipes = (BASELINE.but(attention="eager"), BASELINE.but(attention="eager", checkpointing="off"))
    table = ReplayedTable()
    run(table, trials=3)
    assert table.calls[2][1] == run.problem.recipes[1]


def test_nothing_is_recommended_when_nothing_fits(run: Run) -> None:
    outcome = run(ReplayedTable(limit_bytes=0))
    assert outcome.winner is None
    assert outcome.baseline is not None
    assert outcome.baseline.measurement.status == ProbeStatus.OUT_OF_MEMORY
    assert (outcome.confirmed, outcome.contributions) == (False, ())


def test_an_illegal_baseline_is_probed_and_shown_but_not_recommended(run: Run) -> None:
    run.problem.forbidden = {"checkpointing": "on"}
    table = ReplayedTable(shown={BASELINE: Measurement(ProbeStatus.OK, peak_bytes=1, tokens_per_second=1e9)})
    outcome = run(table)
    assert outcome.baseline is not None
    assert outcome.baseline.measurement.ok
    assert outcome.winner is not None
    assert outcome.winner.candidate["checkpointing"] == "off"
    changed_back = next(item for item in outcome.contributions if item.knob == "checkpointing")
    assert (changed_back.status, changed_back.reason) == (ProbeStatus.VETOED, "checkpointing on is forbidden")


def test_a_baseline_with_a_choice_outside_of_the_space_is_probed(run: Run) -> None:
    outside = BASELINE.but(precision="fp32")
    run.problem.baseline = outside
    outcome = run(ReplayedTable())
    assert outcome.baseline is not None
    assert outcome.baseline.candidate == outside
    assert outcome.winner is not None
    assert outcome.winner.candidate["precision"] == "bf16"


def test_the_time_limit_ends_the_search_and_the_probe_it_cuts_off_is_repeated(durable: Run, now: Now) -> None:
    limits: list[float | None] = []

    def hanging(run: ProbeRun, seconds_left: float | None) -> Measurement:
        limits.append(seconds_left)
        if run.number < 2:
            return measurement(run.candidate)
        now.seconds += seconds_left or 0
        return Measurement(ProbeStatus.TIMEOUT, "took too long")

    outcome = durable(hanging, timeout_seconds=4.0)
    assert all(left is not None and 0 < left <= 4.0 for left in limits)
    assert outcome.records[-1].measurement.status == ProbeStatus.TIMEOUT
    table = ReplayedTable()
    resumed = durable(table, resume=True, trials=4)
    assert table.calls[0][:2] == (outcome.records[-1].number + 1, outcome.records[-1].candidate)
    assert [record.number for record in resumed.records][:3] == [0, 1, 3]


def test_every_probe_and_veto_is_told_as_it_happens(run: Run) -> None:
    outcome = run(ReplayedTable())
    started = [event.number for event in run.events if isinstance(event, ProbeStarted)]
    finished = [event.number for event in run.events if isinstance(event, ProbeFinished)]
    vetoed = [event.number for event in run.events if isinstance(event, CandidateVetoed)]
    assert started == finished
    assert sorted({*finished, *vetoed}) == [record.number for record in outcome.records]


def test_host_memory_that_ran_out_beside_a_gpu_is_not_learnt_as_a_need_of_the_gpu() -> None:
    def excess(status: ProbeStatus) -> float:
        shown = Measurement(status, "in forward", out_of_memory=OutOfMemory(FORWARD, None, None, None))
        first, ended = BASELINE.but(liger="off"), BASELINE.but(liger="on")
        records = [
            Record(0, first, Purpose.BASELINE, measurement(first)),
            Record(1, ended, Purpose.SEARCH, shown),
        ]
        return Surrogate(TableProblem().choices, records, LIMIT_BYTES, Predictor()).excess(ended)

    assert excess(ProbeStatus.HOST_OUT_OF_MEMORY) < 0 < excess(ProbeStatus.OUT_OF_MEMORY)


def test_the_best_so_far_is_told_with_the_probe_that_found_it(run: Run) -> None:
    run(ReplayedTable())
    searched = [event for event in run.events if isinstance(event, ProbeFinished) and event.purpose == Purpose.SEARCH]
    best = [event.measurement.tokens_per_second or 0.0 for event in searched if event.best]
    assert best
    assert best == sorted(best)


def test_what_is_searched_is_raced_against_the_best_so_far_and_what_is_compared_with_it_is_not(run: Run) -> None:
    table = ReplayedTable()
    outcome = run(table)
    shown = {record.candidate: record.purpose for record in outcome.records}
    best, first = 0.0, True
    for _, item, schedule in table.calls:
        searched = schedule == replace(PATIENT.probe, rate_to_beat=schedule.rate_to_beat)
        raced = searched and shown[item] is Purpose.SEARCH
        assert (schedule.rate_to_beat is not None) is (raced and not first)
        assert schedule.rate_to_beat is None or schedule.rate_to_beat <= best
        best, first = max(best, tokens_per_second(item)), False
