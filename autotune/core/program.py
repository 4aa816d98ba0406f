"""The step program: the phases of a trainer's run, in order, and how often each is repeated."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

CONSTRUCTION = "construction"
MICRO_BATCH = "micro-batch"
FORWARD = "forward"
BACKWARD = "backward"
OPTIMIZER_STEP = "optimizer step"
AROUND_GENERATION = "tokenising and padding"
"""The rest of a generation's time outside its phases; not a phase itself."""
LOADING = "loading rows"
"""The time in which the device waits for rows to be read and collated; not a phase itself."""
EVALUATE = "evaluate"
SAVE = "save"
SAVE_ELSEWHERE = "save on another rank"
"""What a rank does in a save that is not the first one, to which engines gather; traced for the host's memory alone."""


class Repeat(StrEnum):
    """How often a phase is repeated."""

    RUN = "once in a run"
    GENERATION = "once for each generation of completions"
    STEP = "once in an optimizer step"
    MICRO_BATCH = "once for each micro-batch"


@dataclass(frozen=True)
class Phase:
    """One phase.

    Attributes:
        name: its name in reports and errors, as in "ran out of memory in reference pass".
        parts: its parts that errors can distinguish, in order. The phase ends with the last of them.
    """

    name: str
    repeat: Repeat
    parts: tuple[str, ...] = ()


@dataclass(frozen=True)
class StepProgram:
    """The phases of a run, in order.

    First those that come once, before the steps; then those of generations and of an optimizer step, its micro-batches
    included; then those that come between steps or after the last one. Every trainer of TRL has construction,
    micro-batches and optimizer steps; :func:`program` adds the phases of a trainer, and :meth:`ending` evaluation and
    saving.
    """

    phases: tuple[Phase, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of phases and of their parts, in order."""
        return tuple(name for phase in self.phases for name in (phase.name, *phase.parts))

    @property
    def before(self) -> tuple[str, ...]:
        """The names of the phases that come once, between construction and the first step."""
        return tuple(phase.name for phase in self.phases[1 : self._steps[0]])

    @property
    def after(self) -> tuple[str, ...]:
        """The names of the phases that come between two steps or after the last one: evaluation and saving."""
        return tuple(phase.name for phase in self.phases[self._steps[-1] + 1 :])

    @property
    def _steps(self) -> tuple[int, ...]:
        return tuple(place for place, phase in enumerate(self.phases) if phase.repeat is not Repeat.RUN)

    def ending(self, *, evaluates: bool) -> StepProgram:
        """Return the program with the phases after the steps: evaluation if there is one, then saving."""
        names = (EVALUATE, SAVE) if evaluates else (SAVE,)
        return StepProgram((*self.phases, *(Phase(name, Repeat.RUN) for name in names)))

    def repeated(self, repeat: Repeat) -> tuple[str, ...]:
        """Return the names of the phases with that repeat, in order."""
        return tuple(phase.name for phase in self.phases if phase.repeat is repeat)

    @property
    def leading(self) -> tuple[str, ...]:
        """The names of the phases that come at the start of each micro-batch, in order."""
        return tuple(name for name in self.repeated(Repeat.MICRO_BATCH) if name != MICRO_BATCH)

    @property
    def apart(self) -> tuple[str, ...]:
        """The names of the phases of a step that belong to no single micro-batch, in order, without the optimizer."""
        wanted = (Repeat.GENERATION, Repeat.STEP)
        return tuple(phase.name for phase in self.phases if phase.repeat in wanted and phase.name != OPTIMIZER_STEP)

    def repeat(self, name: str) -> Repeat:
        """Return how often the phase with that name is repeated."""
        return next(phase.repeat for phase in self.phases if name in (phase.name, *phase.parts))


def program(
    *,
    before: tuple[str, ...] = (),
    in_generation: tuple[str, ...] = (),
    in_step: tuple[str, ...] = (),
    leading: tuple[str, ...] = (),
    in_micro_batch: tuple[str, ...] = (),
) -> StepProgram:
    """Return the program of a trainer with phases in addition to construction, micro-batches and optimizer steps.

    Example: DPO that computes its reference beforehand is ``program(before=("precompute",))``, and with a reference
    model ``program(in_micro_batch=("reference pass",))``.

    Args:
        before: phases that run once, after construction.
        in_generation: phases of each generation of completions, at the start of the first micro-batch that uses them.
        in_step: phases of each optimizer step, before its micro-batches or at the start of the first one.
        leading: phases of each micro-batch, before its forward pass, with a peak of their own.
        in_micro_batch: parts of each micro-batch, between forward and backward.
    """
    return StepProgram(
        (
            Phase(CONSTRUCTION, Repeat.RUN),
            *(Phase(name, Repeat.RUN) for name in before),
            *(Phase(name, Repeat.GENERATION) for name in in_generation),
            *(Phase(name, Repeat.STEP) for name in in_step),
            *(Phase(name, Repeat.MICRO_BATCH) for name in leading),
            Phase(MICRO_BATCH, Repeat.MICRO_BATCH, (FORWARD, *in_micro_batch, BACKWARD)),
            Phase(OPTIMIZER_STEP, Repeat.STEP),
        )
    )
