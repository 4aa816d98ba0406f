"""``torch_empty_cache_steps``: the allocator's cache given back to the GPU before backward passes."""

from __future__ import annotations

from autotune.techniques.base import OFF, POSITIVE, Equipped, Option
from autotune.techniques.trace_impact import Scope, TraceImpact


class TorchEmptyCacheSteps(Equipped):
    """``torch_empty_cache_steps`` of ``TrainingArguments``.

    In every n-th optimizer step, transformers' Trainer empties the cache of each micro-batch after its forward pass.
    A trace is replayed with that for n = 1. With a larger n, the steps between reserve as much as without it. The time
    of giving memory back and reserving it again is measured by a probe, and not part of a predicted time.
    """

    name = "torch_empty_cache_steps"
    summary = "Gives cached memory back to the GPU before the backward pass, and reserves it again when needed."
    options = (
        Option(OFF, "the allocator keeps what it has reserved", entries={}),
        Option(1, "before every backward pass; lowers the peak of reserved memory, and takes time"),
        Option(10, "in every tenth optimizer step (N); other steps have the same peak as without it", family=POSITIVE),
    )
    without_gpu = "it empties the cache of the allocator of GPU memory, and there is no GPU"
    needs = "a CUDA GPU"
    writes = frozenset({"args.torch_empty_cache_steps"})
    impact = TraceImpact(Scope.ALLOCATOR, unplanned="the time that it takes")
