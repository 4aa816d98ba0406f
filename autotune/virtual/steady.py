"""Composes two whole optimizer steps from a trace of one with two calls of the optimizer.

The optimizer allocates its state in its first call, and gradients persist from the first micro-batch of a step on; all
other events repeat. So a step needs to be traced only once and, where its micro-batches are alike, with one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from autotune.virtual.copied import Copy, holds
from autotune.virtual.phases import SECOND_UPDATE, UPDATE, inside, micro_batches
from autotune.virtual.records import Trace, with_peaks


def steady(trace: Trace, first: str, second: str, *, further: bool, of_step: Sequence[str] = ()) -> Trace:
    """Return a trace with one more step than was traced and, if asked for, a further micro-batch in every step.

    Args:
        first: name of the phase of the traced step, which ends after gradients are freed.
        second: name of the phase that is added after it.
        further: whether steps have a further micro-batch, which accumulates into the gradients of the first.
        of_step: names of phases that run once per step, before its micro-batches or at the start of the first one.

    Raises:
        KeyError, IndexError: a phase is missing.
    """
    step, again = trace.phase(first), trace.phase(SECOND_UPDATE)
    update, batch = trace.phase(UPDATE), micro_batches(trace, step)[0]
    positions = [(0, 0), step.begin, batch.end, update.begin, again.begin, again.end, step.end]
    before, passes, rest, update_once, update_again, ending = pairwise(positions)
    copy = Copy(trace)
    again_from = max((phase.end for name in of_step for phase in inside(trace, step, name)), default=step.begin)
    repeated = again_from, batch.end
    copy.take(before)
    for name, updated in ((first, update_once), (second, update_again)):
        begun = copy.place
        copy.take(passes)
        if further:
            # A copy of the first micro-batch, without the phases in it that run once per step.
            added = copy.place
            copy.take(repeated, further=True)
            if not holds(repeated, batch):
                copy.add(batch.name, added)
        for span in (rest, updated, ending):
            copy.take(span)
        copy.add(name, begun)
    copy.take((step.end, (len(trace.events), len(trace.operators))))
    return with_peaks(copy.finished())
