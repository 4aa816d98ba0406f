"""The search problem of a trainer, a search space and a setting."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from functools import cache

from autotune.core.candidate import Candidate, Choice
from autotune.core.setting import Setting
from autotune.errors import InputError
from autotune.space import Space, starting_point
from autotune.trainers.base import Trainer

_MAX_CHECKED, _MAX_COMPARED = 10_000, 200
"""Maximum number of candidates to check for a legal one, and of those whose violated rules are compared."""


@dataclass(frozen=True)
class TrainerProblem:
    """The problem that a study searches; see ``autotune.study.problem.Problem``."""

    trainer: Trainer
    space: Space
    setting: Setting

    def __post_init__(self) -> None:
        # A search repeatedly calls them for the same candidates.
        for method in (self.normal, self.identity, self.illegal, self.knobs_of_violated_rule):
            object.__setattr__(self, method.__name__, cache(method))

    def __reduce__(self) -> tuple[object, ...]:
        """Return the problem's pickle state, without caches."""
        return type(self), tuple(getattr(self, each.name) for each in fields(self))

    @property
    def choices(self) -> Mapping[str, tuple[Choice, ...]]:
        """Concrete choices by knob."""
        return self.space.choices

    @property
    def size(self) -> int:
        """Number of combinations of choices, illegal ones included."""
        return math.prod(len(choices) for choices in self.choices.values())

    @property
    def baseline(self) -> Candidate:
        """TRL's default at the requested global batch, or the user's configuration, with the fixed choices."""
        return self.normal(starting_point(self.trainer.techniques, self.setting))

    @property
    def recipes(self) -> tuple[Candidate, ...]:
        """Candidates to try first."""
        return tuple(dict.fromkeys(self.normal(recipe) for recipe in self.space.recipes))

    @property
    def memory_ordered(self) -> frozenset[str]:
        """Knobs whose larger choice never needs less memory, all else equal, unless it ends accumulation."""
        return frozenset(item.name for item in self.trainer.techniques if item.impact.monotonic)

    @property
    def time_ordered(self) -> frozenset[str]:
        """Knobs whose larger choice never takes a probe less time: they make micro-batches larger and nothing else."""
        return frozenset(
            item.name for item in self.trainer.techniques if item.impact.monotonic and item.impact.sets_only_sizes
        )

    def normal(self, candidate: Candidate) -> Candidate:
        """Return the representative of all candidates with the same plan."""
        return self.trainer.normal(candidate, self.setting)

    def identity(self, candidate: Candidate) -> str:
        """Return the fingerprint of a candidate's plan."""
        return self.trainer.plan(candidate, self.setting).fingerprint

    def accumulates(self, candidate: Candidate) -> bool:
        """Whether gradients exist while a micro-batch runs: transformers' ``Trainer`` frees them after a step."""
        return self.trainer.plan(candidate, self.setting).micro_batches > 1

    def illegal(self, candidate: Candidate) -> str | None:
        """Return why a candidate may not be tried or recommended, or None."""
        return self.trainer.illegal(candidate, self.setting)

    def violated_rules(self, candidate: Candidate) -> Mapping[int, str]:
        """Return the reasons of the rules that a candidate violates, by their places among all rules."""
        reasons = enumerate(self.trainer.violations(candidate, self.setting))
        return {place: reason for place, reason in reasons if reason}

    def knobs_of_violated_rule(self, candidate: Candidate) -> Collection[str]:
        """Return the knobs that the first violated rule reads; every knob if none is violated."""
        return self.trainer.knobs_of_violated_rule(candidate, self.setting)


def require_legal(problem: TrainerProblem) -> None:
    """Check that some candidate is legal: fixed choices can exclude each other.

    A legal candidate differs from an illegal one in a knob that the violated rule reads, so only these knobs are
    changed, one after another.

    Raises:
        InputError: no candidate is legal; the message states a rule that all of them violate, if there is one.
    """
    near = list(dict.fromkeys((problem.baseline, *problem.recipes)))
    seen = set(near)
    for candidate in near:
        if problem.illegal(candidate) is None:
            return
        for knob in problem.choices.keys() & problem.knobs_of_violated_rule(candidate):
            others = {problem.normal(candidate.but(**{knob: choice})) for choice in problem.choices[knob]} - seen
            # The list grows while it is read.
            near.extend(others if len(near) < _MAX_CHECKED else ())
            seen |= others
    # The baseline may keep too few tokens, which is not caused by a fixed choice.
    covering = next((item for item in problem.recipes), problem.baseline)
    # The first rule that it violates may be one that other choices avoid, such as that of a type that the GPU lacks.
    violated = [problem.violated_rules(each) for each in near[:_MAX_COMPARED]]
    reasons = problem.violated_rules(covering).items()
    always = [reason for place, reason in reasons if all(place in each for each in violated)]
    hint = "Fix other choices with --fix KNOB=CHOICE, or add choices of that knob to the space file (--space)."
    raise InputError(f"No candidate is legal: {next(iter(always), problem.illegal(covering))}.", hint=hint)
