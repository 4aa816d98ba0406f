"""The names that parts of a traced optimizer step go by, and how its micro-batches are found."""

from __future__ import annotations

from autotune.virtual.records import Phase, Trace

MICRO_BATCH = "micro-batch"
"""The forward and backward pass of one micro-batch."""
UPDATE = "update"
"""The optimizer's going, after the last micro-batch."""
SECOND_UPDATE = "second update"
"""Its going once more in the same step, before gradients are given up: where the next step is not traced."""


def step_name(number: int) -> str:
    """Return the name of an optimizer step, counted from 0."""
    return f"optimizer step {number}"


def inside(trace: Trace, step: Phase, name: str) -> list[Phase]:
    """Return the phases of a name that lie in a step, in order."""
    found = (phase for phase in trace.phases if phase.name == name)
    return sorted(
        (phase for phase in found if step.first_event <= phase.first_event < step.end_event),
        key=lambda phase: phase.first_event,
    )


def micro_batches(trace: Trace, step: Phase) -> list[Phase]:
    """Return the micro-batches of an optimizer step, in order."""
    return inside(trace, step, MICRO_BATCH)
