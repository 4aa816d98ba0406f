"""Sizes of the micro-batches for which compiled attention is compiled again, after the worst one."""

from __future__ import annotations

from autotune.core.batch_geometry import Layout, Recompiled
from autotune.core.documents import Documents
from autotune.core.plan import TrainingPlan
from autotune.techniques.attention import FLEX
from autotune.trainers.base import Trainer
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
    widths, without_padding = trainer.widths(plan, documents)
    if layout is Layout.FLAT:
        return Recompiled(float(len(widths) > 1))
    narrower, unpadded = widths[-2:-1], without_padding[-1:]
    return Recompiled(
        narrower=sum(narrower) / widths[-1],
        unpadded=sum(unpadded) / widths[-1] if layout is Layout.PADDED else 0.0,
        generated=trainer.padded_together(plan) if isinstance(trainer, Prompted) else 0,
    )
