"""What a training plan says of its traces, as the techniques declare it: sizes, libraries, layers that repeat."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from math import lcm

from autotune.core.plan import TrainingPlan
from autotune.techniques import catalogue
from autotune.techniques.base import Technique

_Fields = Mapping[str, object]


def without_sizes(plan: TrainingPlan) -> tuple[_Fields, _Fields]:
    """Return the arguments and model arguments of a plan, less those that only choose the sizes of micro-batches."""
    return _without(plan, _size_paths())


def same_step(plan: TrainingPlan) -> str:
    """Return a text that is equal for plans that differ in the sizes of their micro-batches alone."""
    return _digest(plan.trainer, *without_sizes(plan))


def libraries_of(plan: TrainingPlan) -> str:
    """Return a text that is equal for plans that leave libraries in the same way, and so may share a process.

    Liger, for instance, changes the classes of models, which stay changed as long as their process lives. What no
    technique writes is taken to do the same.
    """
    return _digest(plan.trainer, *_without(plan, _size_paths() | _harmless_paths()))


def layer_period(plan: TrainingPlan) -> int:
    """Return after how many layers all that a plan says of layers repeats: 6 for every second and every third one."""
    return lcm(*(technique.layer_period(plan) for technique in catalogue()))


def size_knobs() -> frozenset[str]:
    """Return the names of the techniques that choose the sizes of micro-batches, and nothing else of a step."""
    return frozenset(technique.name for technique in catalogue() if technique.only_sizes)


@cache
def _size_paths() -> frozenset[str]:
    return frozenset(_paths(technique for technique in catalogue() if technique.only_sizes))


@cache
def _harmless_paths() -> frozenset[str]:
    return frozenset(_paths(technique for technique in catalogue() if not technique.patches_libraries))


def _paths(techniques: Iterable[Technique]) -> Iterator[str]:
    return (path for technique in techniques for path in technique.writes)


def _without(plan: TrainingPlan, paths: frozenset[str]) -> tuple[_Fields, _Fields]:
    args = {name: value for name, value in plan.args.items() if f"args.{name}" not in paths}
    return args, {name: value for name, value in plan.model.items() if f"model.{name}" not in paths}


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
