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
from autotune.virtual.cost.links import Collective, sending_seconds


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
_MAX_COPIES_TO_HOST = 5
"""Maximum number of asynchronous copies to the host in flight; their sources stay allocated."""

ONE_PROCESS = Launch()
"""A launch of one process."""


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one operator.

    Attributes:
        kind: the resource it occupies; ``NOTHING`` for views, allocations and host operators.
        dtype: the compute dtype, such as ``bfloat16``.
        flops: floating-point operations, a multiply-add counted as two.
        bytes_read: bytes read from device memory, or from host memory for a copy to the device.
        bytes_written: bytes written; for communication, bytes that each rank sends.
        waits: for a copy, whether the host blocks until it is done; for communication, whether the device blocks,
            because it runs on the default stream.
        times: number of executions; an operator of a loop of which one iteration was traced stands for all iterations.
        collective: for communication, the participating ranks; None: ranks of one machine.
        access: for memory-bound operators, the access pattern; for matrix products, whether they are batched.
        kernel: for attention, the kernel if its rate may differ from FlashAttention 2's.
        length: for attention, tokens per row; 0 if unknown.
        backward: for attention, whether it is the backward pass.
        caller: the kind of code that launches it, which sets the launch overhead.
        on_side_stream: whether it runs on a stream other than the default one.
        reused: for each tensor whose block may be in the L2 cache, its bytes, and the bytes of other blocks accessed
            since its last access.
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
        """Return the work of one of ``parts`` equal parts."""
        sizes = (self.flops, self.bytes_read, self.bytes_written)
        flops, bytes_read, bytes_written = (size // parts for size in sizes)
        return replace(self, flops=flops, bytes_read=bytes_read, bytes_written=bytes_written)


def operator_seconds(work: Work, speeds: GpuSpeeds, pace: Pace, launch: Launch = ONE_PROCESS) -> float:
    """Return how long an operator occupies the device, a copy engine or the links to other ranks.

    On the device, it is the larger of compute time and memory time, each at the achieved rate of the operator's class.
    See :func:`_memory_seconds` for memory time.

    Args:
        launch: the processes of the training, and their distribution over machines.
    """
    if work.kind is Kind.COMMUNICATION:
        return sending_seconds(work.bytes_written, work.collective, speeds, launch)
    if work.kind in _COPIES:
        return work.bytes_written / (speeds.pcie * speeds.achieved.copies)
    if work.kind in (Kind.NOTHING, Kind.SYNCHRONIZE):
        return 0.0
    achieved = speeds.achieved
    if work.kind is Kind.ELEMENTWISE:
        memory_seconds = _memory_seconds(work, speeds, achieved.bandwidth_share(work.access))
        return (max(work.flops / speeds.fp32, memory_seconds) + achieved.pass_seconds) * achieved.sustained
    compute_seconds = work.flops / speeds.peak(work.dtype, allow_tf32=pace.allow_tf32)
    if work.kind is Kind.MATMUL:
        compute_seconds = compute_seconds / achieved.product_share(work.dtype)
    else:
        compute_seconds = compute_seconds / achieved.attention_share(work.kernel, work.length, backward=work.backward)
    share = achieved.batched if work.access is Access.BATCHED else achieved.pointwise
    memory_seconds = _memory_seconds(work, speeds, share)
    return (max(compute_seconds, memory_seconds) + achieved.kernel_seconds) * achieved.sustained


def _memory_seconds(work: Work, speeds: GpuSpeeds, share: float) -> float:
    """Return the memory time of an operator: the larger of its cache misses at memory and its bytes at cache bandwidth.

    The cache is modelled as LRU: it holds a tensor if the bytes accessed since, plus those of this operator, fit. A
    write to a block that is not cached counts as a miss, since it evicts other bytes, which are written back.

    Args:
        share: achieved share of the memory bandwidth. That of the cache bandwidth is lower in the same proportion.
    """
    achieved, moved_bytes = speeds.achieved, work.bytes_read + work.bytes_written
    cached_bytes = sum(size for size, since in work.reused if since + moved_bytes <= achieved.cache_bytes)
    miss_seconds = max(0, moved_bytes - cached_bytes) / (speeds.bandwidth * share)
    if not cached_bytes:
        return miss_seconds
    return max(miss_seconds, moved_bytes * achieved.pointwise / (achieved.cache_bandwidth * share))


def step_seconds(works: Iterable[Work], gpu: Gpu, pace: Pace = USUAL_PACE, launch: Launch = ONE_PROCESS) -> StepTime:
    """Return the time of a sequence of operators on a GPU.

    The host launches operators one after another and runs ahead of the device, which executes them in order. A step is
    therefore launch-bound where operators are short, and device-bound where they are long. Copies on the default stream
    run in order with the kernels, such as those of ``save_on_cpu`` (torch/autograd/graph.py). Asynchronous copies on
    another stream overlap with kernels, one copy at a time, and start when their source has been computed. As in
    ``OffloadActivations`` of trl/models/activation_offloading.py, one stream carries both directions; the device waits
    for each copy to the device, and for a copy to the host once five later ones are queued. So a pass is no faster than
    its copies.

    Communication that is asynchronous or on its own stream delays no operator (perfect overlap); communication on the
    default stream overlaps with copies only. Its time is a lower bound: all ranks are assumed to arrive at the same
    time, and messages to be long enough for the full bandwidth of the links.

    Args:
        launch: the processes of the training, and their distribution over machines.

    Raises:
        InputError: the speeds of the GPU are unknown.
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
            if len(to_host) > _MAX_COPIES_TO_HOST:
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
