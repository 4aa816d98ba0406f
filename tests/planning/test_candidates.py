"""Which candidates a plan estimates."""

from __future__ import annotations

from autotune.planning.candidates import MOST_COMBINATIONS, estimated_candidates, legal_candidates
from autotune.space import Wishes
from autotune.trainers import find_trainer
from autotune.trainers.problem import TrainerProblem
from tests.settings import GPU, problem, setting, workload


def problem_of(*, allow_everything: bool = False, **fixed: str | int) -> TrainerProblem:
    trainer = find_trainer("sft")
    allowed = frozenset(item.name for item in trainer.techniques) if allow_everything else frozenset()
    where = setting(machine=GPU, of=workload(), allowed=allowed)
    return problem(where, Wishes(dict(fixed)))


def test_of_a_small_space_all_candidates_are_estimated() -> None:
    asked = problem_of(attention="sdpa", optimizer="adamw_torch", liger="off")
    assert asked.size <= MOST_COMBINATIONS
    assert estimated_candidates(asked) == legal_candidates(asked)


def test_of_a_space_of_millions_a_sample_is_estimated_the_baselines_neighbours_included() -> None:
    asked = problem_of(allow_everything=True)
    assert asked.size > 1_000_000
    found = estimated_candidates(asked)
    assert 1_000 < len(found) <= 25_000
    assert found == estimated_candidates(asked)
    assert all(asked.illegal(candidate) is None for candidate in found)
    near = {
        asked.normal(asked.baseline.but(**{knob: choice}))
        for knob, choices in asked.choices.items()
        for choice in choices
    }
    legal = {candidate for candidate in (*near, *asked.recipes) if asked.illegal(candidate) is None}
    assert legal
    assert legal <= set(found)
