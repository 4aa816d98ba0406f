"""Looks for the shares of a GPU that vLLM may take beside a training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from autotune.core.candidate import Candidate
from autotune.core.estimate import MemoryEstimate
from autotune.core.vllm import VllmOutlook, VllmShare
from autotune.core.workload import ModelProfile
from autotune.planning.vllm import Engine, assumed, reservation, together, why_not

_PARTS = 100
_SHOWN = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def outlook(
    candidate: Candidate,
    training: MemoryEstimate,
    engine: Engine,
    model: ModelProfile,
    *,
    total_bytes: int,
    budget_bytes: int,
    fastest: bool,
) -> VllmOutlook:
    """Return what each share comes to, in steps of a hundredth.

    Args:
        training: what was traced, without vLLM.
        engine: with any share, asleep or not.
        total_bytes: memory of the GPU, which shares are of.
        budget_bytes: what both may need.
        fastest: see :class:`VllmOutlook`.
    """

    def share(utilization: float) -> VllmShare:
        awake = replace(engine, utilization=utilization, sleeps=False)
        asleep = replace(awake, sleeps=True)
        held = reservation(awake, model, total_bytes)
        return VllmShare(
            utilization=utilization,
            requested_bytes=held.requested_bytes,
            cache_bytes=held.cache_bytes,
            sequences=held.sequences,
            spare_bytes=budget_bytes - together(training, awake, model, total_bytes).device_bytes,
            sleeping_spare_bytes=budget_bytes - together(training, asleep, model, total_bytes).device_bytes,
            refused=why_not(awake, model, total_bytes),
        )

    shares = [share(part / _PARTS) for part in range(1, _PARTS)]
    starting = [item for item in shares if not item.refused]
    found = VllmOutlook(
        candidate=candidate,
        fastest=fastest,
        training_bytes=training.device_bytes,
        generation_bytes=training.generation_bytes or 0,
        sequence_tokens=engine.tokens,
        completions=engine.sequences,
        least=next(iter(starting), None),
        most=_last(item for item in starting if item.spare_bytes >= 0),
        most_sleeping=_last(item for item in starting if item.sleeping_spare_bytes >= 0),
        enough=next((item for item in starting if (item.sequences or 0) >= engine.sequences), None),
        shares=(),
        assumptions=tuple(assumed(engine, model)),
    )
    return replace(found, shares=_shown(found, shares))


def _last(shares: Iterable[VllmShare]) -> VllmShare | None:
    return next(iter(reversed(list(shares))), None)


def _shown(found: VllmOutlook, shares: Sequence[VllmShare]) -> tuple[VllmShare, ...]:
    """Return the shares that are answers, and round ones up to the first with which nothing fits."""
    answers = (found.least, found.most, found.most_sleeping, found.enough)
    beyond = max((item.utilization for item in answers if item is not None), default=0.0)
    beyond = next((value for value in _SHOWN if value > beyond), 1.0)
    least = found.least.utilization if found.least is not None else 0.0
    return tuple(
        item
        for item in shares
        if item in answers or (item.utilization in _SHOWN and least <= item.utilization <= beyond)
    )
