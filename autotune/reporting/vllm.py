"""How a training and vLLM share a GPU, in a terminal: the answer in sentences, and the shares as a table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich import box
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autotune.core.estimate import Plan
from autotune.core.vllm import VllmOutlook, VllmShare
from autotune.reporting.listing import listing
from autotune.reporting.plan_words import said_choices
from autotune.reporting.words import MISSING, said_bytes
from autotune.units import format_bytes

_COLUMNS = ("utilization", "reserves", "KV cache", "sequences", "to spare", "with sleep mode")


def drawn_vllm(plan: Plan) -> Iterable[RenderableType]:
    """Return the parts of the outlook of a plan; nothing if it has none."""
    found = plan.vllm
    if found is None:
        return
    yield Text()
    yield Text("vLLM on the same GPU", style="bold")
    which = "" if found.fastest else "the fastest that leaves vLLM enough: " if found.most_sleeping else ""
    for sentence in (f"{which}{said_choices(found.candidate, plan)}", *said_vllm(found)):
        yield Padding(Text(sentence), (0, 0, 0, 2), expand=False)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for share in found.shares:
        table.add_row(*_cells(share))
    yield Padding(table, (0, 0, 0, 2), expand=False)
    yield listing("Assumed of vLLM", found.assumptions)


def said_vllm(found: VllmOutlook) -> Iterator[str]:
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
    return f"; the KV cache then holds {share.sequences:,.0f} sequences of {found.sequence_tokens:,} tokens"


def _cells(share: VllmShare) -> Iterator[RenderableType]:
    yield f"{share.utilization:.2f}"
    yield format_bytes(share.requested_bytes)
    yield Text(said_bytes(share.cache_bytes), style="red" if share.refused else "")
    yield MISSING if share.sequences is None else f"{share.sequences:,.1f}"
    for spare in (share.spare_bytes, share.sleeping_spare_bytes):
        yield Text(said_bytes(spare), style="red" if spare < 0 or share.refused else "")
