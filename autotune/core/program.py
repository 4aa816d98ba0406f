"""The step program: the phases of a trainer's run, in order, and how often each is repeated."""

from __future__ import annotations

from dataclasses import dataclass

CONSTRUCTION = "construction"
MICRO_BATCH = "micro-batch"
FORWARD = "forward"
BACKWARD = "backward"
OPTIMIZER_STEP = "optimizer step"
PRECOMPUTE = "precompute"
"""The pass over the dataset that computes a reference's log-probabilities before training."""
AROUND_GENERATION = "tokenising and padding"
"""The part of a generation's time outside its phases; not a phase itself."""
LOADING = "loading rows"
"""The time in which the device waits for rows to be read and collated; not a phase itself."""
EVALUATE = "evaluate"
SAVE = "save"
SAVE_ELSEWHERE = "save on another rank"
"""A save on a rank other than the first, to which engines gather; traced only for host memory."""

OUTSIDE_MICRO_BATCHES = frozenset({CONSTRUCTION, PRECOMPUTE, OPTIMIZER_STEP, EVALUATE, SAVE})
"""Phases without a micro-batch to train on: its size does not change their memory."""


@dataclass(frozen=True)
class StepProgram:
    """The phases of a run, by their names in reports and errors: "ran out of memory in reference pass".

    Every run has construction, micro-batches and optimizer steps; the attributes are further phases.

    Example: DPO that precomputes reference log-probabilities is ``StepProgram(before=("precompute",))``; with a
    reference model it is ``StepProgram(in_micro_batch=("reference pass",))``.

    Attributes:
        before: phases that run once, after construction.
        in_step: phases of each optimizer step, before its micro-batches or at the start of the first one.
        leading: phases of each micro-batch before its forward pass, with a peak of their own. If completions are
            generated within a step, the generation's phases are here, and precede only the first micro-batch that uses
            its completions; otherwise they are in ``in_step``.
        in_micro_batch: parts of each micro-batch between forward and backward.
        after: phases between two steps or after the last one: evaluation and saving.
    """

    before: tuple[str, ...] = ()
    in_step: tuple[str, ...] = ()
    leading: tuple[str, ...] = ()
    in_micro_batch: tuple[str, ...] = ()
    after: tuple[str, ...] = ()

    @property
    def phases(self) -> tuple[str, ...]:
        """All phases, in order."""
        steps = (*self.in_step, *self.leading, MICRO_BATCH, OPTIMIZER_STEP)
        return (CONSTRUCTION, *self.before, *steps, *self.after)

    @property
    def names(self) -> tuple[str, ...]:
        """All phases and the parts of a micro-batch, as errors name them."""
        return (*self.phases, FORWARD, *self.in_micro_batch, BACKWARD)
