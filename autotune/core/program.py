"""The step program: the phases that a run of a trainer goes through, in order, and how often each comes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

CONSTRUCTION = "construction"
MICRO_BATCH = "micro-batch"
FORWARD = "forward"
BACKWARD = "backward"
OPTIMIZER_STEP = "optimizer step"


class Repeat(StrEnum):
    """How often a phase comes."""

    RUN = "once in a run"
    STEP = "once in an optimizer step"
    MICRO_BATCH = "once for each micro-batch"


@dataclass(frozen=True)
class Phase:
    """One phase.

    Attributes:
        name: what reports and errors call it, as in "ran out of memory in reference pass".
        parts: what it consists of, where errors can tell them apart. The phase is over when the last of them is.
    """

    name: str
    repeat: Repeat
    parts: tuple[str, ...] = ()


@dataclass(frozen=True)
class StepProgram:
    """The phases of a run, in order: those of a run, then those of a step, which micro-batches are a part of.

    Every trainer of TRL constructs, trains on micro-batches, and steps its optimizer; :func:`program` adds the rest.
    """

    phases: tuple[Phase, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of phases and of their parts, in order."""
        return tuple(name for phase in self.phases for name in (phase.name, *phase.parts))

    def repeated(self, repeat: Repeat) -> tuple[str, ...]:
        """Return the names of the phases that come so often, in order."""
        return tuple(phase.name for phase in self.phases if phase.repeat is repeat)

    def repeat(self, name: str) -> Repeat:
        """Return how often the phase of a name comes."""
        return next(phase.repeat for phase in self.phases if name in (phase.name, *phase.parts))


def program(
    *, before: tuple[str, ...] = (), in_step: tuple[str, ...] = (), in_micro_batch: tuple[str, ...] = ()
) -> StepProgram:
    """Return the program of a trainer that does more than train.

    Example: DPO that computes its reference beforehand is ``program(before=("precompute",))``, and with a reference
    model ``program(in_micro_batch=("reference pass",))``.

    Args:
        before: phases of a run, after construction.
        in_step: phases of each optimizer step, before its micro-batches, or first of all in the first one.
        in_micro_batch: parts of each micro-batch, between forward and backward.
    """
    return StepProgram(
        (
            Phase(CONSTRUCTION, Repeat.RUN),
            *(Phase(name, Repeat.RUN) for name in before),
            *(Phase(name, Repeat.STEP) for name in in_step),
            Phase(MICRO_BATCH, Repeat.MICRO_BATCH, (FORWARD, *in_micro_batch, BACKWARD)),
            Phase(OPTIMIZER_STEP, Repeat.STEP),
        )
    )
