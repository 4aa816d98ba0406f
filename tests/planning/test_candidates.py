"""Which candidates a plan estimates."""

from __future__ import annotations

from autotune.planning.candidates import MOST_COMBINATIONS, estimated_candidates, legal_candidates
from autotune.space import Wishes, default_file, load, resolve
from autotune.trainers import find_trainer
from autotune.trainers.problem import TrainerProblem
from tests.settings import GPU, setting, workload


def problem_of(*, allow_everything: bool = False, **fixed: str | int) -> TrainerProblem:
    trainer = find_trainer("sft")
    allowed = frozenset(item.name for item in trainer.techniques) if allow_everything else frozenset()
    where = setting(machine=GPU, of=workload(), allowed=allowed)
    wishes = Wishes(dict(fixed))
    space = resolve(load(default_file("sft"), "sft"), trainer.techniques, where, wishes)
    return TrainerProblem(trainer, space, where, wishes)


def test_of_a_small_space_all_candidates_are_estimated() -> None:
    problem = problem_of(attention="sdpa", optimizer="adamw_torch", liger="off")
    assert problem.size <= MOST_COMBINATIONS
    assert estimated_candidates(problem) == legal_candidates(problem)


def test_of_a_space_of_millions_a_sample_is_estimated_the_baselines_neighbours_included() -> None:
    problem = problem_of(allow_everything=True)
    assert problem.size > 1_000_000
    found = estimated_candidates(problem)
    assert 1_000 < len(found) <= 25_000
    assert found == estimated_candidates(problem)
    assert all(problem.illegal(candidate) is None for candidate in found)
    near = {
        problem.normal(problem.baseline.but(**{knob: choice}))
        for knob, choices in problem.choices.items()
        for choice in choices
    }
    legal = {candidate for candidate in (*near, *problem.recipes) if problem.illegal(candidate) is None}
    assert legal
    assert legal <= set(found)
