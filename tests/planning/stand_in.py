"""A formula in place of traces: it has the parts of a step, and costs that grow with the model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autotune.core.jobs.traced import GpuFigures, Peak, Replayed, TraceReply, TraceRequest
from autotune.core.program import EVALUATE, MICRO_BATCH, OPTIMIZER_STEP
from autotune.core.step_time import StepTime
from autotune.core.timeline import Occurrence, Part, Section
from autotune.probing.tracing import Traced, Untraceable
from autotune.units import MIB

WEIGHT_BYTES = 100 * MIB
VARIED_BYTES, GROWN_BYTES = 7 * MIB, MIB
UNUSED = {"default": (1.05, VARIED_BYTES), "expandable_segments": (1.01, GROWN_BYTES)}
"""Ratios of reserved to allocated bytes, and bytes added by varied lengths, by the choice of the allocator."""
UNTRACEABLE = "flex_attention"
ASSUMED = "the formula holds"
EVALUATED_BYTES = 30_000
"""Bytes of a token in evaluation."""


def kept_by_layer(request: TraceRequest) -> float:
    """Return the bytes of activations that a layer keeps for each token."""
    return 4_000.0 if request.plan.args.get("gradient_checkpointing") else 60_000.0


class AnalyticTracer:
    """Answers requests by a formula, and counts them."""

    def __init__(self) -> None:
        self.requests: list[TraceRequest] = []

    def __call__(self, requests: Sequence[TraceRequest]) -> Iterable[Traced]:
        """Answer requests."""
        self.requests += requests
        return [_answer(request) for request in requests]


class LosingTracer(AnalyticTracer):
    """Loses every trace, as a machine does that kills processes."""

    def __call__(self, requests: Sequence[TraceRequest]) -> Iterable[Traced]:
        """Answer nothing."""
        self.requests += requests
        return [Untraceable("a job ended with signal 9", lasting=False)] * len(requests)


class LosingOnce(AnalyticTracer):
    """Has no time left for its first request."""

    def __call__(self, requests: Sequence[TraceRequest]) -> Iterable[Traced]:
        """Answer nothing the first time."""
        lost, found = not self.requests, super().__call__(requests)
        return [Untraceable("no time was left", lasting=False)] * len(requests) if lost else found


def _answer(request: TraceRequest) -> Traced:
    if request.plan.model.get("attn_implementation") == UNTRACEABLE:
        return Untraceable(f"{UNTRACEABLE} is not supported")
    layers = request.layers or 0
    rows = int(str(request.plan.args["per_device_train_batch_size"]))
    lengths = [row[0] for row in request.worst]
    longest = sum(lengths) if request.plan.args["packing"] else max(lengths)
    tokens = rows * longest
    weights, kept = WEIGHT_BYTES * layers, round(kept_by_layer(request) * tokens)
    state = 0 if request.plan.args["optim"] == "sgd" else 2 * weights
    head = 5_000 * tokens
    held = {"parameter": weights, "optimizer state": state}
    forward = [{**held, "activation": kept * layer, "temporary": kept} for layer in range(1, layers + 1)]
    names = ["layer"] * layers + ["head"]
    sections = []
    micro_batches = int(str(request.plan.args.get("gradient_accumulation_steps", 2)))
    for occurrence in (Occurrence.FIRST, Occurrence.FURTHER)[:micro_batches]:
        gradients = weights if occurrence is Occurrence.FURTHER else 0
        part = Part(MICRO_BATCH, occurrence)
        moments = [*forward, {**held, "activation": kept * layers, "temporary": head}]
        sections.append(_section(part, names, [{**moment, "gradient": gradients} for moment in moments], tokens))
    sections.append(_section(Part(OPTIMIZER_STEP, Occurrence.ONCE), ["step"], [{**held, "gradient": weights}], 0))
    if request.plan.evaluates:
        part = Part(EVALUATE, Occurrence.AFTER)
        sections.append(_section(part, ["head"], [{**held, "temporary": EVALUATED_BYTES * tokens}], tokens))
    peak = max(max(section.totals) for section in sections)
    allocated_bytes = peak + 64 * MIB
    replays = []
    for share, added in UNUSED.values() if request.target == "cuda" and not request.steps_alone else ():
        reserved = round(share * allocated_bytes)
        replays.append(Replayed(allocated_bytes, reserved, reserved, added if request.varied else None))
    times = tuple(section.time for section in sections)
    gpus = [
        GpuFigures(gpu.compute_capability if gpu else None, gpu.speeds if gpu else None, tuple(replays), times)
        for gpu in (request.gpu, *request.others)
    ]
    return TraceReply(
        device=Peak(peak), host=Peak(0), worst_rows=rows, worst_tokens=tokens,
        tokens_per_step=0.0, sections=tuple(sections), assumptions={ASSUMED: 2},
        gpus=tuple(gpus),
    )  # fmt: skip


def _section(part: Part, names: list[str], moments: list[dict[str, int]], tokens: int) -> Section:
    levels = {name: tuple(moment[name] for moment in moments) for name in moments[0]}
    seconds = 0.001 + 1e-6 * tokens
    return Section(part, tuple(names), levels, 0, StepTime(seconds, seconds, 0.0, 0.0, 0.0, 0.0))
