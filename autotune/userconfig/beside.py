"""Reads what autotune wrote beside a configuration: the document of the bundle that it may be of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from autotune.core.bundle import PlannedBundle
from autotune.core.codec import DecodeError, decode
from autotune.core.configuration import Configuration
from autotune.core.json_text import read_json
from autotune.core.plan import TrainingPlan
from autotune.core.result import Result
from autotune.core.verdict import Finding, Severity
from autotune.emit.bundle import PLAN, RESULT

_Document = TypeVar("_Document")
DOCUMENTS = (RESULT, PLAN)
"""The files of a bundle that say what it is, of a study and of a plan."""
# What TRL's and transformers' classes make of their own defaults (__post_init__).
_FILLED_IN = frozenset({"bf16", "gradient_checkpointing_kwargs", "pad_to_multiple_of", "steps_per_generation"})


def result_in(folder: Path) -> Result | None:
    """Return the result of the study whose bundle a folder is; None if it is of none."""
    return _decoded(Result, folder / RESULT)


def trainer_in(folder: Path) -> str | None:
    """Return the trainer that the bundle in a folder is for; None if there is none."""
    found = (_read(folder / name) for name in DOCUMENTS)
    named = (document.get("trainer") for document in found if isinstance(document, dict))
    return next((name for name in named if isinstance(name, str)), None)


def planned_findings(config: Configuration, plan: TrainingPlan, folder: Path) -> Iterator[Finding]:
    """Yield that a configuration is one of ``autotune plan``, where it is."""
    known = _decoded(PlannedBundle, folder / PLAN)
    if known is not None and trains_like(known.plan, plan, config):
        yield Finding(
            Severity.NOTE,
            f"autotune planned this configuration and has not measured it ({PLAN} has what it predicted).",
        )


def trains_like(known: TrainingPlan, plan: TrainingPlan, config: Configuration) -> bool:
    """Return whether a configuration has all that a bundle's plan has, and nothing else that matters to a step."""
    differing = (name for name in plan.args if config.values.get(name) != config.defaults.get(name))
    further = {name for name in differing if name not in known.args} - _FILLED_IN
    model = {name: value for name, value in known.model.items() if value not in (None, False)}
    return (
        not further
        and all(plan.args.get(name, config.values.get(name)) == value for name, value in known.args.items())
        and all(plan.model.get(name) == value for name, value in model.items())
        and plan.env == known.env
    )


def _decoded(kind: type[_Document], file: Path) -> _Document | None:
    try:
        return decode(kind, _read(file))
    except DecodeError:
        return None


def _read(file: Path) -> Any:
    try:
        return read_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
