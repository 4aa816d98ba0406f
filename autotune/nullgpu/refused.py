"""Functions of NVIDIA's libraries that a null GPU refuses, since a stub's success would mislead."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Refusal:
    """Functions that are refused.

    Attributes:
        pattern: regular expression of their whole names.
        code: what they return: the library's own code for what is not supported.
        belongs_to: what they are for, which the error names.
    """

    pattern: str
    code: int
    belongs_to: str


REFUSALS = (
    Refusal(r"cudaGraph\w+|cudaStream(BeginCapture|EndCapture|UpdateCapture)\w*", 801, "CUDA graphs"),
    Refusal(r"cuGraph\w+|cuStreamBeginCapture\w*", 801, "CUDA graphs"),
    Refusal(
        r"cudaIpc\w+|cuMem(Export|Import)\w+|cuMemRetainAllocationHandle|cuMemGetAllocationPropertiesFromHandle",
        801,
        "device memory shared between processes",
    ),
    Refusal(r"cuMulticast\w+|cuStreamWriteValue32\w*|cuMemsetD32Async", 801, "symmetric memory"),
    Refusal(r"cuGreenCtx\w+|cuCtxFromGreenCtx|cuDevSm\w+|cu\w*DevResource\w*", 801, "green contexts"),
    # What follows writes sizes or results that the caller reads on the host.
    Refusal(r"cudnnGet\w*(Workspace|Space|States)Sizes?\w*|cudnn(Find|Get)\w*Algorithm\w*", 3000, "cuDNN's older API"),
    Refusal(r"cudnnDropoutGetStatesSize|cudnn\w*RNN\w*", 3000, "cuDNN's recurrent layers"),
    Refusal(r"cudnn\w*CTC\w*", 3000, "cuDNN's CTC loss"),
    Refusal(r"cusolverDn(?!Create$|Destroy$|SetStream$)\w+", 9, "dense linear algebra of cuSOLVER"),
    Refusal(
        r"cusparse(?!Lt)(?!Create$|Destroy$|SetStream$|SetPointerMode$|GetErrorString$)\w+", 10, "sparse matrices"
    ),
    Refusal(r"cusparseLt\w+", 10, "structured sparsity of cuSPARSELt"),
    Refusal(r"cufft(?!GetErrorString$)\w+", 16, "Fourier transforms of cuFFT"),
    Refusal(r"curand(?!GetErrorString)\w+", 101, "cuRAND's generators on the host"),
    Refusal(r"cuFile\w+", 5001, "GPUDirect Storage"),
    Refusal(r"nvshmem\w+", 1, "NVSHMEM"),
    Refusal(
        r"nccl(CommInitAll|CommShrink|CommGrow|CommWindow\w+|CommRegister|CommDeregister|MemAlloc|MemFree|DevComm\w+"
        r"|Put\w+|Signal|WaitSignal|Get\w+Pointer|CommSuspend|CommResume|GroupSimulateEnd|CommMemStats)",
        5,
        "registered buffers and one-sided operations of NCCL",
    ),
)  # fmt: skip


def refusal(function: str) -> Refusal | None:
    """Return why a function is refused, or None for one whose stub may return success."""
    return next((each for each in REFUSALS if re.fullmatch(each.pattern, function)), None)
