"""Recognises the bundle that a configuration belongs to, and compares its plan with the configuration's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from autotune.core.configuration import Configuration
from autotune.core.documents.bundle import Basis, PlannedBundle
from autotune.core.documents.verdict import Finding, Severity
from autotune.core.files.codec import decoded
from autotune.core.files.nested import mapping
from autotune.core.plan import TrainingPlan
from autotune.emit.bundle import PLAN, RESULT, UNFINISHED
from autotune.techniques.traits import MEASURED_FIELDS

DOCUMENTS = (RESULT, PLAN)
"""The documents of a bundle: of a search, and of a plan."""
# Fields that TRL's and transformers' classes fill in from other defaults (__post_init__).
_DERIVED_FIELDS = frozenset({
    "bf16", "gradient_checkpointing_kwargs", "pad_to_multiple_of", "steps_per_generation",
})  # fmt: skip


def trainer_in(folder: Path) -> str | None:
    """Return the trainer of the bundle in a folder, or None without a bundle."""
    named = (mapping(decoded(dict, folder / name)).get("trainer") for name in DOCUMENTS)
    return next((name for name in named if isinstance(name, str)), None)


def holds_planned_bundle(folder: Path) -> bool:
    """Return whether a folder has a planned bundle, of any version, finished or not."""
    return Basis.PLANNED in [mapping(decoded(dict, folder / name)).get("basis") for name in (PLAN, UNFINISHED)]


def planned_findings(config: Configuration, plan: TrainingPlan, folder: Path) -> Iterator[Finding]:
    """Yield a finding if ``autotune plan`` wrote the configuration."""
    known = decoded(PlannedBundle, folder / PLAN)
    if known is not None and trains_like(known.plan, plan, config):
        yield Finding(
            Severity.NOTE, f"autotune planned this configuration and has not measured it ({PLAN} has the prediction)."
        )


def trains_like(known: TrainingPlan, plan: TrainingPlan, config: Configuration) -> bool:
    """Return whether a configuration has the values of a bundle's plan, and sets no other field that affects a step."""
    differing = (name for name in plan.args if config.values.get(name) != config.defaults.get(name))
    further = {name for name in differing if name not in known.args} - _DERIVED_FIELDS - MEASURED_FIELDS
    model = {name: value for name, value in known.model.items() if value not in (None, False)}
    return (
        not further
        and all(plan.args.get(name, config.values.get(name)) == value for name, value in known.args.items())
        and all(plan.model.get(name) == value for name, value in model.items())
        and plan.env == known.env
    )
