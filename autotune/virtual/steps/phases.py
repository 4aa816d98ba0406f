"""Names of the phases of a traced optimizer step, and functions that find its micro-batches."""

from __future__ import annotations

from autotune.core.program import MICRO_BATCH
from autotune.virtual.recording.records import Phase, Trace

__all__ = ["MICRO_BATCH", "SECOND_UPDATE", "UPDATE", "inside", "micro_batches", "step_name"]

UPDATE = "update"
"""The optimizer step, after the last micro-batch."""
SECOND_UPDATE = "second update"
"""A second call of the optimizer before gradients are freed; it represents the update of the next step."""


def step_name(number: int) -> str:
    """Return the name of an optimizer step, counted from 0."""
    return f"optimizer step {number}"


def inside(trace: Trace, step: Phase, name: str) -> list[Phase]:
    """Return the phases of that name within a step, in order."""
    found = (phase for phase in trace.phases if phase.name == name)
    return [phase for phase in found if step.first_event <= phase.first_event < step.end_event]


def micro_batches(trace: Trace, step: Phase) -> list[Phase]:
    """Return the micro-batches of an optimizer step, in order."""
    return inside(trace, step, MICRO_BATCH)
