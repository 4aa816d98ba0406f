"""The predicted time of a training step, and the factors that measurements correct it by."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Factors:
    """Factors by which operations take longer than the roofline model. They are fitted to measurements; 1.0 is the
    roofline itself.

    Attributes:
        matmul: matrix products and convolutions, over the GPU's peak.
        attention: fused attention, over the GPU's peak.
        memory: what the device's memory bounds, over its bandwidth.
        copies: copies between host and device, over the nominal rate of PCIe.
        communication: sending to other ranks, over the nominal rate of NVLink, PCIe or the network.
        launch_seconds: host time for one operator in eager mode. The default is within the 5 to 25 µs that
            https://jiahuanglin.xyz/all_lessons/gpu_kernel_serving/18_pytorch_to_kernel.html sums up; it depends on the
            host and was not measured here.
        allow_tf32: whether float32 products may use TF32 (``tf32=True`` in the trainer's arguments).
    """

    matmul: float = 1.0
    attention: float = 1.0
    memory: float = 1.0
    copies: float = 1.0
    communication: float = 1.0
    launch_seconds: float = 1e-5
    allow_tf32: bool = False


@dataclass(frozen=True)
class StepTime:
    """The predicted time of a step, and its parts. The parts overlap, so they do not sum to the whole.

    Attributes:
        seconds: time from the first launch until device, copies and host are done.
        matmul_seconds, attention_seconds, elementwise_seconds: time of the device, by kind of operator.
        copy_seconds: time of the two copy engines together.
        launch_seconds: time of the host.
        flops: floating-point operations of matrix products and attention.
        communication_seconds: time of the links to other ranks.
    """

    seconds: float
    matmul_seconds: float
    attention_seconds: float
    elementwise_seconds: float
    copy_seconds: float
    launch_seconds: float
    flops: int
    communication_seconds: float = 0.0
