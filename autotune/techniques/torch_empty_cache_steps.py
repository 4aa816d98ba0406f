"""``torch_empty_cache_steps``: returns the allocator's cache to the GPU before backward passes."""

from __future__ import annotations

from autotune.techniques.base import OFF, POSITIVE, Equipped, Option
from autotune.techniques.trace_impact import Scope, TraceImpact


class TorchEmptyCacheSteps(Equipped):
    """``torch_empty_cache_steps`` of ``TrainingArguments``.

    In every n-th optimizer step, transformers' Trainer empties the cache of each micro-batch after its forward pass.
    A trace replays this for n = 1. With a larger n, the steps in between reserve as much as without it. Probes measure
    the time to return and reserve memory; predicted times exclude it.
    """

    summary = "Empties PyTorch's cache before the backward pass."
    options = (
        Option(OFF, "the allocator keeps its reserved memory", entries={}),
        Option(1, "before every backward pass; lowers the peak of reserved memory, and takes time"),
        Option(10, "in every tenth optimizer step (N); other steps have the same peak as without it", family=POSITIVE),
    )
    without_gpu = "it empties the cache of the allocator of GPU memory, and there is no GPU"
    needs = "a CUDA GPU"
    impact = TraceImpact(Scope.ALLOCATOR, unplanned="its time")
