"""The search by traces, compared with brute force: on recorded traces of a whole space, and on formulas."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import optuna
import pytest

from autotune.core.candidate import Candidate
from autotune.core.documents.estimate import Estimate, MemoryEstimate, Origin, rank_key
from autotune.study.improvement import nearest_legal, search_by_traces
from benchmarks.replay.tables import RECORDED, RecordedRunner, Reordered, Table, legal_candidates, read_table
from tests.settings import GPU, problem, setting, workload
from tests.study.replayed import LIMIT_BYTES, STATE_BYTES, TableProblem, peak_bytes, tokens_per_second

ORDERS = range(10)
BY_DAY = ORDERS[:2]
"""The orders of knobs in which a space is searched in every run of the tests."""
in_orders = pytest.mark.parametrize(
    "orders", [BY_DAY, pytest.param(ORDERS, marks=pytest.mark.nightly)], ids=["few", "all"]
)
in_each_order = pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed in BY_DAY else pytest.mark.nightly) for seed in ORDERS]
)


@cache
def recorded(name: str) -> Table:
    return read_table(RECORDED / f"{name}.json.gz")


@pytest.fixture
def table() -> Table:
    return recorded("small")


@dataclass
class Formulas:
    """Runs candidates by the formulas of the replayed table."""

    budget_bytes: int = LIMIT_BYTES
    untraceable: str = ""

    def __post_init__(self) -> None:
        self.asked: list[Candidate] = []

    def run(self, candidates: Sequence[Candidate]) -> list[Estimate]:
        """Return the results of candidates."""
        self.asked += candidates
        return [self.estimate(candidate) for candidate in candidates]

    def estimate(self, candidate: Candidate) -> Estimate:
        """Return the result of a candidate."""
        if candidate["attention"] == self.untraceable:
            return Estimate(candidate, Origin.UNKNOWN, reason="no rule for its kernel")
        need_bytes = peak_bytes(candidate)
        breakdown = {"parameter": STATE_BYTES, "activation": need_bytes - STATE_BYTES}
        memory = MemoryEstimate(need_bytes, need_bytes, 0, breakdown, 0, 1.0, 0.1)
        rate = tokens_per_second(candidate)
        return Estimate(candidate, Origin.TRACED, memory, rate, self.budget_bytes - need_bytes)


def best_of(found: Iterable[Estimate]) -> Estimate:
    return min((each for each in found if each.memory is not None), key=rank_key)


def assert_as_good(found: Estimate, best: Estimate, share: float = 0.01) -> None:
    assert found.fits == best.fits
    assert found.memory is not None
    assert best.memory is not None
    if best.fits:
        assert (found.tokens_per_second or 0.0) >= (1 - share) * (best.tokens_per_second or 0.0)
    else:
        assert found.memory.device_bytes <= (1 + share) * best.memory.device_bytes


@in_orders
@pytest.mark.parametrize("budget", [1.0, 0.5, 0.25, 0.2, 0.15, 0.05])
def test_the_best_found_of_recorded_traces_is_within_one_percent_of_the_best_of_all(
    budget: float, orders: Sequence[int], table: Table
) -> None:
    counts, limit_bytes = [], round(budget * table.limit_bytes)
    best = RecordedRunner(table, limit_bytes).everything()[0]
    for seed in orders:
        runner = RecordedRunner(table, limit_bytes)
        search_by_traces(Reordered(table.replayed(), seed), runner)  # type: ignore[arg-type]
        assert_as_good(best_of(map(runner.estimate, runner.asked)), best)
        assert len(runner.asked) == len(set(runner.asked))
        counts.append(len(runner.asked))
    # It does not look at everything.
    assert sum(counts) / len(counts) < 0.6 * len(table.rows)


@pytest.mark.parametrize(
    ("name", "budget"),
    [
        *(("8b_full", 1.5), ("8b_full", 0.5), ("8b_dpo", 1.0), ("8b_dpo", 0.25), ("8b_lora", 0.5), ("dpo", 1.0)),
        *(
            pytest.param(name, budget, marks=pytest.mark.nightly)
            for name, budgets in (
                ("8b_full", (1.0, 0.8, 0.25)),
                ("8b_dpo", (1.5, 0.8, 0.5)),
                ("8b_lora", (1.0,)),
                ("dpo", (0.5,)),
            )
            for budget in budgets
        ),
    ],
)
@in_orders
def test_the_best_found_for_other_shapes_is_within_one_percent_of_the_best_of_a_whole_space(
    name: str, budget: float, orders: Sequence[int]
) -> None:
    table = recorded(name)
    here, limit_bytes = table.replayed(), round(budget * table.limit_bytes)
    best = RecordedRunner(table, limit_bytes).everything()[0]
    for seed in orders:
        runner = RecordedRunner(table, limit_bytes)
        search_by_traces(Reordered(here, seed), runner)  # type: ignore[arg-type]
        assert_as_good(best_of(map(runner.estimate, runner.asked)), best)
        assert len(runner.asked) <= 100


@in_orders
@pytest.mark.parametrize("budget_bytes", [250, 300, 400, 600, 900, 1500, 100])
def test_the_best_found_of_a_table_of_formulas_is_the_best_of_all(budget_bytes: int, orders: Sequence[int]) -> None:
    here = TableProblem()
    everything = [each for each in here.everything() if here.illegal(each) is None]
    best = best_of(Formulas(budget_bytes).run(everything))
    for seed in orders:
        runner = Formulas(budget_bytes)
        search_by_traces(Reordered(here, seed), runner)  # type: ignore[arg-type]
        legal = (each for each in runner.asked if here.illegal(each) is None)
        assert_as_good(best_of(map(runner.estimate, legal)), best)
        assert len(runner.asked) <= 75


def test_the_baseline_is_first_then_the_recipes_and_what_is_illegal_is_not_run() -> None:
    fast = Candidate({**TableProblem().baseline, "attention": "flash", "packing": "bfd"})
    wrong = Candidate({**TableProblem().baseline, "packing": "bfd"})
    here, runner = TableProblem(recipes=(fast, wrong)), Formulas()
    search_by_traces(here, runner)
    assert runner.asked[:2] == [here.baseline, fast]
    assert wrong not in runner.asked


def test_no_more_is_run_than_the_limit_and_a_search_ends_when_it_is_not_to_go_on() -> None:
    runner, hurried, answers = Formulas(), Formulas(), iter([True, False])
    assert search_by_traces(TableProblem(), runner, limit=7)
    assert len(runner.asked) == 7
    assert not search_by_traces(TableProblem(), hurried, goes_on=lambda: next(answers))
    assert len(hurried.asked) == 1
    assert search_by_traces(TableProblem(), Formulas())


def test_a_normal_form_may_have_a_choice_that_is_none_of_the_space_s() -> None:
    class Shortened(TableProblem):
        """Batches above 3 rows are of 3 rows: there are no more."""

        def normal(self, candidate: Candidate) -> Candidate:
            """Return the candidate with at most 3 rows."""
            return super().normal(candidate).but(batch=min(3, int(candidate["batch"])))

    class Of(Formulas):
        """Knows the formulas of 3 rows, too."""

        def estimate(self, candidate: Candidate) -> Estimate:
            return replace(super().estimate(candidate.but(batch=2)), candidate=candidate)

    here = Shortened(baseline=TableProblem().baseline.but(batch=3))
    runner = Of()
    search_by_traces(here, runner)
    assert {candidate["batch"] for candidate in runner.asked} == {1, 2, 3}


@pytest.mark.parametrize("untraceable", ["sdpa", "flash"])
def test_a_choice_that_cannot_be_traced_does_not_end_the_search_and_is_given_up_soon(untraceable: str) -> None:
    here = TableProblem()
    legal = [each for each in here.everything() if here.illegal(each) is None]
    for seed in BY_DAY:
        runner = Formulas(untraceable=untraceable)
        search_by_traces(Reordered(here, seed), runner)  # type: ignore[arg-type]
        assert_as_good(best_of(map(runner.estimate, runner.asked)), best_of(map(runner.estimate, legal)))
        assert sum(each["attention"] == untraceable for each in runner.asked) <= 12


def test_the_user_s_log_level_of_optuna_stays() -> None:
    level = optuna.logging.get_verbosity()
    search_by_traces(TableProblem(), Formulas(), limit=2)
    assert optuna.logging.get_verbosity() == level


def test_rules_name_the_knobs_that_have_to_be_changed_too() -> None:
    here = problem(setting(machine=GPU, of=workload(), allowed=frozenset({"lora", "quantization"})))
    for knob, choice, changed in (("quantization", "4bit-nf4", {"lora"}), ("precision", "bfloat16", {"lora"})):
        found = nearest_legal(here, here.baseline, knob, choice)
        assert found
        for candidate in found:
            assert here.illegal(candidate) is None
            assert changed <= candidate.differences(here.baseline).keys() - {knob}


def test_only_the_knobs_that_the_forbidding_rule_reads_are_in_conflict() -> None:
    here = problem(setting(machine=GPU, of=workload(), allowed=frozenset({"lora", "quantization"})))
    legal = next(recipe for recipe in here.recipes if here.illegal(recipe) is None)
    illegal = here.normal(legal.but(quantization="4bit-nf4"))
    assert here.illegal(illegal)
    conflict = here.knobs_of_violated_rule(illegal)
    assert set(conflict) == {"quantization", "lora", "peft_config"}
    singles = ((knob, choice) for knob, choices in here.choices.items() for choice in choices if knob not in conflict)
    others = [here.normal(illegal.but(**{knob: choice})) for knob, choice in singles]
    kept = [each for each in others if {knob: each[knob] for knob in conflict}.items() <= illegal.items()]
    assert len(kept) > 10
    assert all(map(here.illegal, kept))


def test_the_nearest_legal_candidates_are_those_of_brute_force(table: Table) -> None:
    here = table.problem()
    legal = legal_candidates(here)
    for start, (knob, choices) in itertools.product(legal[::29], here.choices.items()):
        for choice in choices:
            found = nearest_legal(here, start, knob, choice)
            having = [each for each in legal if each[knob] == choice]
            nearest = min((len(each.differences(start)) for each in having), default=math.inf)
            # Beyond two changes, one that removes no reason by itself is not followed.
            assert found or nearest > 2
            assert {len(each.differences(start)) for each in found} <= {nearest, nearest + 1}


def test_of_what_is_as_fast_the_one_that_needs_less_is_looked_at() -> None:
    here = problem(setting(machine=GPU, of=workload(lengths={1024: 8})))

    class Allocating(Formulas):
        """One optimizer is faster by too little to count, and one way to use the allocator takes less memory."""

        def estimate(self, candidate: Candidate) -> Estimate:
            rows = int(candidate["per_device_train_batch_size"])
            need_bytes = 100 * rows + (candidate["allocator"] == "default")
            memory = MemoryEstimate(need_bytes, need_bytes, 0, {"activation": need_bytes}, 0, 1.0, 0.1)
            rate = 10.0 + 1e-5 * (candidate["optimizer"] == "adamw_torch") + 1e-6 * rows
            return Estimate(candidate, Origin.TRACED, memory, rate, 2000 - need_bytes)

    runner = Allocating()
    search_by_traces(here, runner)
    best = best_of(map(runner.estimate, runner.asked)).candidate
    assert (best["optimizer"], best["allocator"]) == ("adamw_torch", "expandable_segments")


def test_what_may_not_fit_by_its_error_is_shown_beside_what_does() -> None:
    runner = Formulas(budget_bytes=600)
    search_by_traces(TableProblem(), runner)
    found = [runner.estimate(candidate) for candidate in runner.asked]
    best = best_of(found)
    safe = [each for each in found if each.fits and each.fits_with_error]
    assert best.fits_with_error or (safe and rank_key(best_of(safe)) > rank_key(best))
    assert replace(best, reason="") == best


@in_each_order
def test_a_choice_that_frees_memory_beside_another_one_alone_is_found(seed: int) -> None:
    here = problem(setting(machine=GPU, of=workload(lengths={1024: 8})))

    class Coupled(Formulas):
        """Without checkpointing a step is faster and does not fit, but with an optimizer that costs speed."""

        def estimate(self, candidate: Candidate) -> Estimate:
            stored, slower = candidate["gradient_checkpointing"] == "off", candidate["optimizer"] == "adamw_torch"
            need_bytes = (1500 if slower else 5000) if stored else 1000
            memory = MemoryEstimate(need_bytes, need_bytes, 0, {"parameter": need_bytes}, 0, 1.0, 0.1)
            rate = (140.0 if stored else 100.0) - 5 * slower
            return Estimate(candidate, Origin.TRACED, memory, rate, 2000 - need_bytes)

    runner = Coupled()
    search_by_traces(Reordered(here, seed), runner)  # type: ignore[arg-type]
    assert best_of(map(runner.estimate, runner.asked)).tokens_per_second == 135.0


@in_each_order
def test_a_choice_that_is_faster_beside_two_others_alone_is_tried_before_a_search_ends(seed: int) -> None:
    class Coupled(Formulas):
        """Liger's kernels are slower, but with packed rows and without checkpointing."""

        def estimate(self, candidate: Candidate) -> Estimate:
            faster = candidate["packing"] != "none" and candidate["checkpointing"] == "off"
            factor = {"off": 1.0, "on": 1.1 if faster else 0.8}[str(candidate["liger"])]
            rate = tokens_per_second(candidate.but(liger="off")) * factor
            return replace(super().estimate(candidate), tokens_per_second=rate)

    here, runner = TableProblem(), Coupled(2500)
    search_by_traces(Reordered(here, seed), runner)  # type: ignore[arg-type]
    best = best_of(map(runner.estimate, filter(lambda each: here.illegal(each) is None, here.everything())))
    assert best_of(map(runner.estimate, runner.asked)).tokens_per_second == best.tokens_per_second
