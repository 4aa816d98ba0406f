"""What micro-batches of other lengths add to a plan, by one more trace: of all layers, at the size that is planned."""

from __future__ import annotations

from dataclasses import replace

from autotune.core.batch_geometry import Layout, Shape
from autotune.core.gpu import Gpu
from autotune.core.plan import TrainingPlan
from autotune.core.setting import Setting
from autotune.planning.extrapolation.anchors import LONGEST_FLAT
from autotune.planning.requests import trace_request
from autotune.planning.tracing.store import Traces
from autotune.probing.tracing import Untraceable


def varied_bytes(
    traces: Traces, plan: TrainingPlan, layout: Layout, shape: Shape, layers: int, setting: Setting, gpu: Gpu | None
) -> int | None:
    """Return what the caching allocator reserves beyond the need of the largest micro-batch, or None if not traced.

    It does not follow from few layers: where few are kept for the backward pass, what the logits leave behind in the
    cache has room for them.

    Args:
        shape: the largest micro-batch.
        layers: of the whole model.
        gpu: None for the CPU, whose allocator keeps no cache.
    """
    if gpu is None:
        return 0
    if layout is Layout.FLAT and shape.tokens > LONGEST_FLAT:
        return None
    reply = traces.get([replace(trace_request(plan, layout, shape, layers, setting, gpu), varied=True)])[0]
    return None if isinstance(reply, Untraceable) else reply.varied_bytes
