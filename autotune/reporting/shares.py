"""How a training and vLLM share a GPU, as values: the answer in sentences, and the shares as a table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autotune.core.estimate import Plan
from autotune.core.vllm import VllmOutlook, VllmShare
from autotune.reporting.plan_words import said_choices
from autotune.reporting.words import MISSING, said_bytes
from autotune.units import format_bytes

TITLE = "vLLM on the same GPU"
ASSUMED = "Assumed of vLLM"
COLUMNS = ("utilization", "reserves", "KV cache", "sequences", "to spare", "with sleep mode")


@dataclass(frozen=True)
class Cell:
    """A figure in words, and whether it is why a share of the GPU cannot be."""

    text: str
    short: bool = False


@dataclass(frozen=True)
class Shares:
    """What vLLM may take of the GPU beside one training.

    Attributes:
        answer: which training it is, and what it leaves to vLLM, in sentences.
        rows: a share each, with a cell for each of :data:`COLUMNS`.
        assumptions: in sentences.
    """

    answer: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    assumptions: tuple[str, ...]


def shares(plan: Plan) -> Shares | None:
    """Return what a plan says of vLLM, or None if that is nothing."""
    found = plan.vllm
    if found is None:
        return None
    which = "" if found.fastest else "the fastest that leaves vLLM enough: " if found.most_sleeping else ""
    return Shares(
        answer=(f"{which}{said_choices(found.candidate, plan)}", *_said(found)),
        rows=tuple(tuple(_cells(share)) for share in found.shares),
        assumptions=found.assumptions,
    )


def _said(found: VllmOutlook) -> Iterator[str]:
    """Yield which shares leave training enough, and what the cache then holds, in sentences."""
    alone, held = format_bytes(found.training_bytes), format_bytes(found.generation_bytes)
    yield f"Training needs {alone} by itself, and holds {held} of them while completions are generated."
    if found.least is None:
        yield "vLLM does not start with any share of this GPU."
        return
    names = {"Without sleep mode": found.most, "With sleep mode": found.most_sleeping}
    for name, most in names.items():
        if most is None:
            missing = found.least.spare_bytes if name == "Without sleep mode" else found.least.sleeping_spare_bytes
            yield (
                f"{name}, no vllm_gpu_memory_utilization leaves training enough: vLLM starts from "
                f"{found.least.utilization:.2f} on, and {format_bytes(-missing)} are missing then."
            )
        else:
            yield (
                f"{name}, vllm_gpu_memory_utilization from {found.least.utilization:.2f} to {most.utilization:.2f} "
                f"leaves training enough{_held(found, most)}."
            )
    if found.enough is not None and found.most_sleeping is not None:
        yield (
            f"From {found.enough.utilization:.2f} on, the cache holds all {found.completions:,} completions of a "
            "generation batch at once."
        )


def _held(found: VllmOutlook, share: VllmShare) -> str:
    if share.sequences is None or found.sequence_tokens is None:
        return ""
    return f"; the KV cache then holds {int(share.sequences):,} sequences of {found.sequence_tokens:,} tokens"


def _cells(share: VllmShare) -> Iterator[Cell]:
    yield Cell(f"{share.utilization:.2f}")
    yield Cell(format_bytes(share.requested_bytes))
    yield Cell(said_bytes(share.cache_bytes), bool(share.refused))
    yield Cell(MISSING if share.sequences is None else f"{share.sequences:,.1f}")
    for spare in (share.spare_bytes, share.sleeping_spare_bytes):
        yield Cell(said_bytes(spare), spare < 0 or bool(share.refused))
