"""The predicted time of a training step, and the factors that it depends on apart from the GPU."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pace:
    """Factors of a training's speed, apart from the rates that the GPU achieves.

    Attributes:
        launch_seconds: host time for one operator in eager mode, autograd's and the module's Python included. It
            depends on the host: training steps of PEFT's method comparison that the device does not bound take 32 to
            78 µs for each (`benchmarks/published/speeds.md`), and 18 to 83 µs were found over other tables.
        without_graph: share of that time where autograd is off, as in generation. On the host of an H200, a training
            step that the device does not bound took 29 µs for each operator, and generation 21 to 24
            (`benchmarks/gpu/results`).
        by_triton: host time for a kernel that Triton launches, with the Python of the function that it is in, as a
            multiple of that for one operator: fitted to six steps with Liger that the host of an H100 bounds
            (`benchmarks/gpu/results`), which took longer by 20 to 85 % than with 1, and now by 1 to 16 %. Another on an
            H200, DPO, took longer by 84 %, and now by 20 %.
        allow_tf32: whether float32 products may use TF32 (``tf32=True`` in the trainer's arguments).
    """

    launch_seconds: float = 3e-5
    without_graph: float = 0.75
    by_triton: float = 8.0
    allow_tf32: bool = False


USUAL_PACE = Pace()
"""That of transformers' Trainer in eager mode, without TF32."""


@dataclass(frozen=True)
class StepTime:
    """The predicted time of a step, and its parts. The parts overlap, so they do not sum to the whole.

    Attributes:
        seconds: time from the first launch until device, copies and host are done.
        matmul_seconds, attention_seconds, elementwise_seconds: time of the device, by kind of operator.
        copy_seconds: time of copies between the device and the host.
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

    @property
    def device_seconds(self) -> float:
        """Time in which the device computes."""
        return self.matmul_seconds + self.attention_seconds + self.elementwise_seconds

    @property
    def busiest_seconds(self) -> float:
        """How long the busiest of device, copies, links and host works."""
        return max(self.device_seconds, self.copy_seconds, self.launch_seconds, self.communication_seconds)
