"""The predicted time of a training step, and the host's time per operator."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Caller(StrEnum):
    """The caller of an operator, on which the host's time to launch it depends.

    Attributes:
        MODULE: Python of a module in a forward pass, recorded by autograd.
        HOOKED: the same with hooks on saved tensors, as in checkpointing and offloading, and the recomputation of a
            checkpoint.
        SELECTIVE: the same with a Python policy for each operator, as in selective checkpointing.
        ENGINE: autograd's engine, in a backward pass.
        PLAIN: Python without autograd, as in generation, in the optimizer and in functions with a backward pass of
            their own.
        LOOP: PyTorch's own loop within an operator, as over the groups of a product.
        KERNEL: a function of bitsandbytes around one kernel: an optimizer's for one parameter, or the one that expands
            the quantised scales of a weight.
        LIBRARY: a kernel of a library such as Triton or bitsandbytes with all of the Python around it, as a 4-bit
            module's.
    """

    MODULE = "module"
    HOOKED = "hooked"
    SELECTIVE = "selective"
    ENGINE = "engine"
    PLAIN = "plain"
    LOOP = "loop"
    KERNEL = "kernel"
    LIBRARY = "library"


@dataclass(frozen=True)
class Pace:
    """The host's time per operator, and whether TF32 is allowed.

    The host's times are ``launch_seconds`` times a factor for each :class:`Caller`. They were fitted to 70 steps of
    plain fine-tuning on the hosts of an H100, three times, and an H200 (`benchmarks/gpu/results`), with one
    ``launch_seconds`` for each host. In brackets are measurements of tiny models, whose kernels take next to no time,
    on the host of an H100 (`benchmarks/gpu/results/host.md`).

    Attributes:
        launch_seconds: host time for one operator of a module, Python and autograd included. It depends on the host: on
            those four, 40, 50, 52 and 56 µs (44). Of published speeds, to which nothing was fitted, PEFT's method
            comparison agrees with 30, and Lit-GPT's 7B and 13B in bfloat16 with 51 to 56
            (`benchmarks/published/speeds.md`).
        hooked: 1.1 (1.4 in a forward pass, 1.5 in the recomputation).
        selective: 2.2 (2.8 and 3.4).
        engine: 0.5 (0.6).
        plain: 0.5: with it, the seven steps with generation are within 37 % (1.0).
        loop: 0.2: on null GPUs (A100, H100), 3 to 4 µs for each product, and 11 to 22 µs for a module's.
        kernel: 2, fitted to two steps only, ``adamw_bnb_8bit`` of 0.5B and 1.5B on one H100: their updates took 143 and
            215 µs for each tensor, kernels included. With it for quantised scales, Lit-GPT's rows with nested
            quantisation are as far off as those without; with ``library`` they were up to 58 % too slow.
        library: 8.
        allow_tf32: whether float32 products may use TF32 (``tf32=True`` in the trainer's arguments).
    """

    launch_seconds: float = 5e-5
    hooked: float = 1.1
    selective: float = 2.2
    engine: float = 0.5
    plain: float = 0.5
    loop: float = 0.2
    kernel: float = 2.0
    library: float = 8.0
    allow_tf32: bool = False

    def host_seconds(self, caller: Caller) -> float:
        """Return the host's time to launch one operator."""
        return self.launch_seconds * (1.0 if caller is Caller.MODULE else getattr(self, caller.value))


TIME_ERROR, HOST_BOUND_ERROR = 0.25, 0.5
"""Stated relative errors of predicted times; the second if the host bounds the step, since its time per operator is
assumed. `docs/accuracy.md` has the shares of measured steps within them."""

USUAL_PACE = Pace()
"""The pace of transformers' Trainer in eager mode, without TF32, next to a GPU."""
CPU_PACE = Pace(hooked=1.6, selective=4.2, engine=0.58, plain=0.8)
"""The same on a CPU, where kernels hide none of the time of hooks and policies: least squares over the steps of tiny
models on two AMD EPYC (`benchmarks/gpu/results/host.md`)."""


def usual_pace(device: str) -> Pace:
    """Return the usual pace of a training on that kind of device."""
    return CPU_PACE if device == "cpu" else USUAL_PACE


@dataclass(frozen=True)
class StepTime:
    """The predicted time of a step, and its parts. The parts overlap, so they do not sum to the whole.

    Attributes:
        seconds: time from the first launch until device, copies and host are done.
        matmul_seconds, attention_seconds, elementwise_seconds: time of the device, by kind of operator.
        copy_seconds: time of copies between the device and the host.
        launch_seconds: time of the host.
        communication_seconds: time of the links to other ranks.
    """

    seconds: float
    matmul_seconds: float
    attention_seconds: float
    elementwise_seconds: float
    copy_seconds: float
    launch_seconds: float
    communication_seconds: float = 0.0

    @property
    def device_seconds(self) -> float:
        """Time in which the device computes."""
        return self.matmul_seconds + self.attention_seconds + self.elementwise_seconds

    @property
    def busiest_seconds(self) -> float:
        """Busy time of the busiest of device, copies, links and host."""
        return max(self.device_seconds, self.copy_seconds, self.launch_seconds, self.communication_seconds)

    @property
    def host_bound(self) -> bool:
        """Whether the host is the busiest."""
        return self.launch_seconds == self.busiest_seconds
