"""Traces how much memory micro-batches of varied lengths add to a plan, at full depth and at the planned size."""

from __future__ import annotations

from dataclasses import replace

from autotune.core.batch_geometry import Layout, Shape
from autotune.core.gpu import Gpu
from autotune.core.plan import TrainingPlan
from autotune.core.setting import Setting
from autotune.planning.requests import trace_request
from autotune.planning.tracing.store import Traces
from autotune.probing.tracing import Untraceable


def varied_bytes(
    traces: Traces, plan: TrainingPlan, layout: Layout, shape: Shape, layers: int, setting: Setting, gpu: Gpu | None
) -> int | None:
    """Return the bytes that the caching allocator reserves beyond the need of the largest micro-batch.

    None means that it was not traced. The figure cannot be extrapolated from few layers: the activations of few layers
    fit into the cached blocks that the logits leave behind.

    Args:
        shape: the largest micro-batch.
        layers: number of layers of the whole model.
        gpu: None for the CPU, whose allocator keeps no cache.
    """
    if gpu is None:
        return 0
    request = trace_request(plan, layout, shape, layers, setting, gpu)
    reply = traces.get([replace(request, allocator=plan.allocator, varied=True)])[0]
    return None if isinstance(reply, Untraceable) else reply.varied_bytes
