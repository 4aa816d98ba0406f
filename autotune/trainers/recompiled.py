"""Sizes of the micro-batches for which compiled attention is compiled again, after the worst one."""

from __future__ import annotations

from autotune.core.batch_geometry import Layout, Recompiled, rounded_up
from autotune.core.documents import Documents
from autotune.core.plan import TrainingPlan
from autotune.techniques.attention import FLEX
from autotune.trainers.base import Trainer
from autotune.trainers.geometry import number
from autotune.trainers.prompts import Prompted


def compiled_again(trainer: Trainer, plan: TrainingPlan, layout: Layout, documents: Documents) -> Recompiled:
    """Return the largest micro-batches for which FlexAttention can be compiled again after the worst one.

    transformers compiles it for the first micro-batch alone, then for micro-batches of all widths together
    (``torch.compile`` without ``dynamic``). Rows come in random order, so the first can be the worst micro-batch, and
    the second the widest of those that are narrower. Micro-batches without padding have no mask of padding: attention
    is compiled apart for the widest of them. A last micro-batch of fewer rows, once in an epoch, is left out.

    Args:
        layout: of the worst micro-batch.
    """
    if plan.model.get("attn_implementation") != FLEX:
        return Recompiled()
    multiple, length = number(plan, "pad_to_multiple_of") or 1, plan.truncate_to or number(plan, "max_length")
    widths = sorted({rounded_up(width, multiple) for width in documents.by_width(length)})
    if layout is Layout.FLAT:
        return Recompiled(float(len(widths) > 1))
    narrower, unpadded = widths[-2:-1], _without_padding(documents, length, multiple, trainer.drawn(plan))[-1:]
    return Recompiled(
        narrower=sum(narrower) / widths[-1],
        unpadded=sum(unpadded) / widths[-1] if layout is Layout.PADDED else 0.0,
        generated=trainer.padded_together(plan) if isinstance(trainer, Prompted) else 0,
    )


def _without_padding(documents: Documents, length: int | None, multiple: int, together: int) -> list[int]:
    """Return the widths of micro-batches that need no padding, ascending."""
    counts: dict[int, int] = {}
    for some, sequences in documents.kept(length):
        width = sequences.max(axis=1)
        whole = (sequences.min(axis=1) == width) & (width % multiple == 0)
        for tokens, count in zip(width[whole].tolist(), some[whole].tolist(), strict=True):
            counts[tokens] = counts.get(tokens, 0) + count
    return sorted(tokens for tokens, count in counts.items() if count >= together)
