"""Estimates the time of a step on a GPU: roofline per operator, launch overhead, and copies."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from autotune.core.gpu import Gpu, GpuSpeeds
from autotune.core.plan import Launch
from autotune.core.step_time import USUAL_PACE, Caller, Pace, StepTime
from autotune.errors import InputError
from autotune.virtual.links import Collective, sending_seconds


class Kind(StrEnum):
    """The resource that an operator occupies."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    ELEMENTWISE = "elementwise"
    TO_DEVICE = "copy to device"
    TO_HOST = "copy to host"
    COMMUNICATION = "communication"
    SYNCHRONIZE = "synchronize"
    NOTHING = "nothing"


class Access(StrEnum):
    """How a memory-bound operator passes over its tensors, which determines its share of the bandwidth."""

    POINTWISE = "pointwise"
    STRIDED = "strided"
    REDUCTION = "reduction"
    NORM = "norm"
    SOFTMAX = "softmax"
    GATHER = "gather"
    DEQUANTIZE = "dequantize"
    OPTIMIZER = "optimizer"
    BATCHED = "batched"


_COPIES = (Kind.TO_DEVICE, Kind.TO_HOST)
_HELD = 5
"""Copies to the host whose sources are kept until they are done."""

ALONE = Launch()
"""The launch of a process that shares its training with no other."""


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one operator.

    Attributes:
        kind: the resource it occupies; ``NOTHING`` is a view, an allocation, or an operator of the host.
        dtype: the type that it computes in, such as ``bfloat16``.
        flops: floating-point operations, a multiply-add counted as two.
        bytes_read: bytes read from the device's memory, or from the host's for a copy from there.
        bytes_written: bytes written; for communication, those that each rank sends to others.
        waits: for a copy, whether the host waits until it is done; for communication, whether the device does, because
            it is on the device's default stream.
        times: number of executions; an operator of a loop that was traced once stands for all its repetitions.
        collective: for communication, which ranks take part; None: some of one machine.
        access: for what memory bounds, how it passes over its tensors; for matrix products, whether they are batched.
        kernel: for attention, the kernel, where its rate may differ from FlashAttention 2's.
        length: for attention, tokens of a row; 0: not known.
        backward: for attention, whether it is the backward pass.
        caller: who has the host launch it.
        on_side_stream: whether it runs on another than the device's default stream.
        reused: for each tensor read or written whose block a cache may hold, its bytes, and those of other blocks that
            were touched since.
    """

    kind: Kind
    dtype: str = ""
    flops: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    waits: bool = False
    times: int = 1
    collective: Collective | None = None
    access: Access = Access.POINTWISE
    kernel: str = ""
    length: int = 0
    backward: bool = False
    caller: Caller = Caller.MODULE
    on_side_stream: bool = False
    reused: tuple[tuple[int, int], ...] = ()

    def part(self, parts: int) -> Work:
        """Return the work of one of so many equal parts."""
        sizes = (self.flops, self.bytes_read, self.bytes_written)
        flops, bytes_read, bytes_written = (size // parts for size in sizes)
        return replace(self, flops=flops, bytes_read=bytes_read, bytes_written=bytes_written)


def operator_seconds(work: Work, speeds: GpuSpeeds, pace: Pace, launch: Launch = ALONE) -> float:
    """Return how long an operator occupies the device, a copy engine or the links to other ranks.

    On the device it is the larger of compute and memory time, each at the rate that such operators achieve; memory
    time is that of what the cache does not hold, or that of all bytes in the cache.

    Args:
        launch: the processes of the training, and the machines that they are in.
    """
    if work.kind is Kind.COMMUNICATION:
        return sending_seconds(work.bytes_written, work.collective, speeds, launch)
    if work.kind in _COPIES:
        return work.bytes_written / (speeds.pcie * speeds.achieved.copies)
    if work.kind in (Kind.NOTHING, Kind.SYNCHRONIZE):
        return 0.0
    achieved = speeds.achieved
    if work.kind is Kind.ELEMENTWISE:
        passing = _passing_seconds(work, speeds, achieved.passing(work.access))
        return (max(work.flops / speeds.fp32, passing) + achieved.pass_seconds) * achieved.sustained
    computing = work.flops / speeds.peak(work.dtype, allow_tf32=pace.allow_tf32)
    if work.kind is Kind.MATMUL:
        computing = computing / achieved.product(work.dtype)
    else:
        computing = computing / achieved.attended(work.kernel, work.length, backward=work.backward)
    share = achieved.batched if work.access is Access.BATCHED else achieved.pointwise
    passing = _passing_seconds(work, speeds, share)
    return (max(computing, passing) + achieved.kernel_seconds) * achieved.sustained


def _passing_seconds(work: Work, speeds: GpuSpeeds, share: float) -> float:
    """Return how long an operator's bytes pass between the device's cores, its cache and its memory.

    A cache that replaces the least recently used bytes holds a tensor if those that were touched since and the
    operator's own, which it passes over meanwhile, fit into it. What is written into a block that it does not hold
    takes the place of other bytes, which are written to the memory for it.

    Args:
        share: of the memory's bandwidth, that such operators reach. They reach as much less of the cache's.
    """
    achieved, moved = speeds.achieved, work.bytes_read + work.bytes_written
    held = sum(size for size, since in work.reused if since + moved <= achieved.cache_bytes)
    missed = max(0, moved - held) / (speeds.bandwidth * share)
    if not held:
        return missed
    return max(missed, moved * achieved.pointwise / (achieved.cache_bandwidth * share))


def step_seconds(works: Iterable[Work], gpu: Gpu, pace: Pace = USUAL_PACE, launch: Launch = ALONE) -> StepTime:
    """Return the time of a sequence of operators on a GPU.

    The host launches operators one after another and runs ahead of the device, which executes them in order. A step is
    therefore bound by launches where operators are short, and by the device where they are long. Copies on the default
    stream are executed in order too, such as those of ``save_on_cpu`` (torch/autograd/graph.py). Asynchronous copies on
    another stream overlap with that, one at a time, and start when their source has been computed. As
    ``OffloadActivations`` of trl/models/activation_offloading.py has it, they are on one stream for both directions,
    and the device waits for a copy to it, which it reads next, and for a copy to the host when five others follow it.
    So a pass is no faster than its copies. No operator waits for communication that an engine starts asynchronously or
    on a stream of its own, so that this overlap is the best possible; what it runs on the default stream overlaps with
    copies only. That all ranks arrive at the same time, and that messages are long enough for the links' full speed,
    makes it a lower bound.

    Args:
        launch: the processes of the training, and the machines that they are in.

    Raises:
        InputError: the speeds of the GPU are not known.
    """
    speeds = gpu.speeds
    if speeds is None:
        raise InputError(f"The speed of {gpu.name} is not known.", hint="Name a GPU whose time can be predicted.")
    host = device = launching = 0.0
    copied = sent = 0.0
    to_host: deque[float] = deque()
    busy = dict.fromkeys(Kind, 0.0)
    for work in works:
        kind = work.kind
        if kind is Kind.NOTHING:
            continue
        if kind is Kind.SYNCHRONIZE:
            host = device = max(host, device)
            continue
        launch_seconds = pace.host_seconds(work.caller) * work.times
        launching += launch_seconds
        host += launch_seconds
        seconds = operator_seconds(work, speeds, pace, launch) * work.times
        busy[kind] += seconds
        begin = max(host, device)
        if kind is Kind.COMMUNICATION:
            sent = max(begin, sent) + seconds
            device = sent if work.waits else device
        elif kind not in _COPIES or not (work.waits or work.on_side_stream):
            device = begin + seconds
        elif work.waits:
            host = device = copied = max(begin, copied) + seconds
        elif kind is Kind.TO_DEVICE:
            copied = max(host, copied) + seconds
            device = max(device, copied)
        else:
            copied = max(begin, copied) + seconds
            to_host.append(copied)
            if len(to_host) > _HELD:
                device = max(device, to_host.popleft())
    return StepTime(
        seconds=max(host, device, copied, sent),
        matmul_seconds=busy[Kind.MATMUL],
        attention_seconds=busy[Kind.ATTENTION],
        elementwise_seconds=busy[Kind.ELEMENTWISE],
        copy_seconds=busy[Kind.TO_DEVICE] + busy[Kind.TO_HOST],
        launch_seconds=launching,
        communication_seconds=busy[Kind.COMMUNICATION],
    )
