"""Derives from the techniques which plans share traces or a process, and how traces are extrapolated."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cache

from autotune.core.machine import Hardware
from autotune.core.plan import EPOCHS, STEPS, TrainingPlan
from autotune.techniques import catalogue
from autotune.techniques.base import Technique
from autotune.techniques.sharding import FULL_EVALUATION
from autotune.techniques.trace_impact import PlanImpact, Scope

_Fields = Mapping[str, object]


AVERAGE_TOKENS = "average_tokens_across_devices"
"""The field that divides the loss by the tokens of all processes, for which they exchange their token counts."""
MEASURED_FIELDS = frozenset({
    AVERAGE_TOKENS,
    "dataloader_multiprocessing_context", "dataloader_num_workers", "dataloader_persistent_workers",
    "dataloader_pin_memory", "dataloader_prefetch_factor", "ddp_broadcast_buffers", "ddp_bucket_cap_mb",
    "ddp_find_unused_parameters", "ddp_static_graph", "full_determinism", EPOCHS, STEPS, *FULL_EVALUATION,
})  # fmt: skip
"""Fields of ``transformers.TrainingArguments`` that change measured speeds but no trace; no technique writes them."""

# Accumulated gradients are held from a step's second micro-batch on, so two micro-batches show the peak.
MAX_TRACED = 2
"""Most micro-batches of a step that are traced."""


def without_sizes(plan: TrainingPlan) -> tuple[_Fields, _Fields]:
    """Return a plan's arguments and model arguments, without those that affect only sizes, allocator or devices."""
    return _without(plan, _untraced_paths())


def library_patches_key(plan: TrainingPlan) -> str:
    """Return a key that is equal for plans that patch libraries in the same way, and so may share a process.

    Patches last until the process ends, except the model classes that Liger replaces, which a trace restores. Arguments
    that no technique writes are assumed to patch libraries. With several processes, accelerate and DeepSpeed keep
    values derived from the arguments in the process and its environment, such as the number of processes.
    """
    parts = _without(plan, _untraced_paths() | _harmless_paths())
    return json.dumps((plan.trainer, *parts, plan.launch.processes), sort_keys=True)


def plan_impact(plan: TrainingPlan) -> PlanImpact:
    """Return the combined effect of a plan's techniques on the extrapolation of its traces."""
    return PlanImpact.of_all(technique.impact.in_plan(plan) for technique in catalogue())


def has_no_predicted_time(plan: TrainingPlan, hardware: Hardware) -> bool:
    """Return whether no time is predicted for a step of a plan; on a CPU, the traced time always is."""
    return hardware.kind == "cuda" and plan_impact(plan).untimed


@cache
def _untraced_paths() -> frozenset[str]:
    techniques = (item for item in catalogue() if item.impact.scope in (Scope.SIZES, Scope.ALLOCATOR))
    return frozenset({*_paths(techniques), *(f"args.{name}" for name in MEASURED_FIELDS)})


@cache
def _harmless_paths() -> frozenset[str]:
    return frozenset(_paths(technique for technique in catalogue() if not technique.impact.patches_libraries))


def _paths(techniques: Iterable[Technique]) -> Iterator[str]:
    return (path for technique in techniques for path in technique.writes)


def _without(plan: TrainingPlan, paths: frozenset[str]) -> tuple[_Fields, _Fields]:
    args = {name: value for name, value in plan.args.items() if f"args.{name}" not in paths}
    return args, {name: value for name, value in plan.model.items() if f"model.{name}" not in paths}
