"""What a rank holds between micro-batches where that is no sum over layers: taken from a trace of the whole model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autotune.core.program import CONSTRUCTION, OPTIMIZER_STEP
from autotune.core.protocol import TraceReply
from autotune.core.timeline import Occurrence, Section

_GRADIENT = "gradient"
"""PyTorch's category of what engines keep gradients in."""


def with_shares_of(whole: TraceReply, reply: TraceReply) -> TraceReply:
    """Return a trace of few layers in which gradients between micro-batches are those of the whole model.

    ZeRO-2's buffer of gradients has every tensor whole that the rank's share has a part of, so it changes by jumps with
    the depth, and so does what the update makes of it. The update depends neither on the micro-batch nor on what layers
    compute, so it is taken from the trace of the whole model. In a micro-batch, the buffers of this category are as
    many at each moment as in the trace of few layers, and each is as large as that of the whole model.
    """
    held, wanted = _held(reply), _held(whole)
    updates = {section.part: section for section in whole.sections if section.part.phase in _UPDATES}
    sections = []
    for section in reply.sections:
        if section.part in updates:
            sections.append(replace(updates[section.part], time=section.time))
        elif section.part.occurrence is not Occurrence.AFTER and held:
            sections.append(replace(section, levels=_scaled(section.levels, wanted, held)))
        else:
            sections.append(section)
    return replace(reply, sections=tuple(sections))


_UPDATES = (CONSTRUCTION, OPTIMIZER_STEP)


def _held(reply: TraceReply) -> int:
    """Return the bytes of gradients at the first moment of the update."""
    update: Section | None = next((one for one in reply.sections if one.part.phase == OPTIMIZER_STEP), None)
    return update.levels.get(_GRADIENT, (0,))[0] if update is not None else 0


def _scaled(levels: Mapping[str, tuple[int, ...]], wanted: int, held: int) -> Mapping[str, tuple[int, ...]]:
    return {
        name: tuple(round(value * wanted / held) for value in values) if name == _GRADIENT else values
        for name, values in levels.items()
    }
