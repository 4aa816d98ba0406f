"""Which candidates a plan estimates."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from autotune.app.options import checked_options
from autotune.app.problem import problem_of as problem_from
from autotune.core.candidate import Candidate, Choice
from autotune.core.machine import Machine
from autotune.planning.candidates import MOST_COMBINATIONS, estimated_candidates, legal_candidates
from autotune.space import Wishes
from autotune.trainers import find_trainer, trainers
from autotune.trainers.problem import TrainerProblem
from tests.settings import GPU, problem, setting, workload

EIGHT = Machine(replace(GPU.hardware, processes=8), {**GPU.packages, "deepspeed": "0.19.8"})


def problem_of(*, allow_everything: bool = False, **fixed: str | int) -> TrainerProblem:
    trainer = find_trainer("sft")
    allowed = frozenset(item.name for item in trainer.techniques) if allow_everything else frozenset()
    where = setting(machine=GPU, of=workload(), allowed=allowed)
    return problem(where, Wishes(dict(fixed)))


@pytest.mark.parametrize("trainer", sorted(trainers()))
@pytest.mark.parametrize("allowed", [(), ("lora", "optimizer", "beta")], ids=["nothing allowed", "some allowed"])
def test_the_legal_candidates_are_those_that_looking_at_each_combination_finds(
    trainer: str, allowed: tuple[str, ...]
) -> None:
    of = replace(workload(), trainer=trainer)
    whole = problem(setting(machine=GPU, of=of, allowed=frozenset(allowed)), trainer=trainer)
    few = {knob: choices[:4] for knob, choices in whole.choices.items()}
    # What most techniques have a rule about stays; of the others one choice, so that combinations are thousands.
    for knob in ("attention", "allocator", "hub_kernels", "torch_empty_cache_steps", "torch_compile", "precision"):
        few[knob] = few[knob][:1] if knob in few else ()
    asked = replace(whole, space=replace(whole.space, choices={knob: few[knob] for knob in whole.choices}))
    every = (
        Candidate(dict(zip(asked.choices, chosen, strict=True)))
        for chosen in itertools.product(*asked.choices.values())
    )
    normal = dict.fromkeys(map(asked.normal, every))
    expected = tuple(candidate for candidate in normal if asked.illegal(candidate) is None)
    assert expected
    found = legal_candidates(asked)
    assert found == expected
    assert [tuple(candidate) for candidate in found] == [tuple(candidate) for candidate in expected]


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


@pytest.mark.parametrize(
    ("knob", "choice"), [("context_parallel", 2), ("dp_replicate_size", 2), ("offload", "both"), ("sharding", "zero2")]
)
def test_what_was_fixed_of_the_engine_stands_in_each_candidate(knob: str, choice: Choice) -> None:
    options = checked_options(trainer="sft", num_processes=8, global_batch_size=32, fix={knob: choice})
    found = estimated_candidates(problem_from(options, workload(lengths={20: 50, 1000: 50}), EIGHT, 32))
    assert len(found) > 500
    assert {candidate[knob] for candidate in found} == {choice}


def test_of_a_sample_each_choice_has_candidates_that_differ_in_it_alone() -> None:
    of = workload(lengths={20: 50, 100: 40, 500: 9, 9000: 1})
    asked = problem(setting(machine=EIGHT, of=of, global_batch_size=32))
    # Of these rows TRL's default cuts more than is asked for, so it is no candidate itself.
    assert asked.illegal(asked.normal(asked.baseline)) is not None
    found = set(estimated_candidates(asked))
    shown = {
        (knob, candidate[knob])
        for candidate in found
        for knob, choices in asked.choices.items()
        if any(choice != candidate[knob] and candidate.but(**{knob: choice}) in found for choice in choices)
    }
    levels = {knob: {candidate[knob] for candidate in found} for knob in asked.choices}
    assert shown == {(knob, choice) for knob, choices in levels.items() if len(choices) > 1 for choice in choices}
    engines = {
        "sharding": ("ddp", "zero1", "zero2", "zero3", "fsdp2"),
        "offload": ("none", "optimizer", "parameters", "both"),
        "context_parallel": (1, 2, 4, 8),
        "reshard_after_forward": ("on", "off"),
    }
    assert {(knob, choice) for knob, choices in engines.items() for choice in choices} <= shown
