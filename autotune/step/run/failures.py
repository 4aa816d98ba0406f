"""Classifies an exception of a probe as out of device memory, out of host memory, unsupported, or crashed."""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass

import torch

from autotune.confidential import hidden
from autotune.core.machine import DeviceKind
from autotune.core.status import ProbeStatus
from autotune.errors import AutotuneError, causes
from autotune.units import parse_size

# In the messages of PyTorch's allocators for CUDA and for a CPU.
_REQUESTED = re.compile(r"[Tt]ried to allocate (\d+(?:\.\d+)? (?:bytes|[KMGT]iB))")
_HOST_MEMORY_MESSAGES = ("can't allocate memory", "Cannot allocate memory", "std::bad_alloc")
_DEVICE_MEMORY_MESSAGES = ("out of memory", "_STATUS_ALLOC_FAILED")
# oneDNN raises these when it cannot allocate memory for generated code, and the interpreter when a thread's stack does
# not fit; both have other causes too, so they count only close to an enforced limit.
_AMBIGUOUS_MESSAGES = (
    "could not create a primitive",
    "could not create a memory",
    "could not execute",
    "can't start new thread",
)
# oneDNN took 19 MiB at its first bfloat16 product (measured with torch 2.13), and takes more for larger layers: a
# process is close to its limit when no more than this is left, or no more than this share of the limit.
_HEADROOM_BYTES = 32 * 2**20
_HEADROOM_SHARE = 1 / 8
_UNSUPPORTED_ERRORS = (ImportError, NotImplementedError, ValueError)
_REASON_LINES = 3
_REASON_CHARACTERS = 400


@dataclass(frozen=True)
class ClassifiedError:
    """The classification of an exception.

    Attributes:
        reason: in words.
        requested_bytes: size of the failed allocation on the device; None if the message lacks it.
    """

    status: ProbeStatus
    reason: str
    requested_bytes: int | None = None


def classify_error(
    error: Exception,
    *,
    began_training: bool,
    device: DeviceKind,
    limit_bytes: int | None = None,
    headroom_bytes: int | None = None,
) -> ClassifiedError:
    """Classify an exception.

    Args:
        began_training: whether a whole step was completed; unsupported configurations fail earlier.
        device: the device of the training; with a GPU, host memory may run out instead of device memory.
        limit_bytes: the enforced limit, or None.
        headroom_bytes: bytes left below the limit when the exception was raised; None without such a limit.
    """
    reason = _reason(error)
    at_limit = headroom_bytes is not None and headroom_bytes < max(
        _HEADROOM_BYTES, _HEADROOM_SHARE * (limit_bytes or 0)
    )
    cause = next((link for link in causes(error) if _is_out_of_memory(link, at_limit)), None)
    if cause is not None and device != "cpu" and _is_host_memory_error(cause):
        return ClassifiedError(ProbeStatus.HOST_OUT_OF_MEMORY, _reason(cause))
    if cause is not None:
        return ClassifiedError(ProbeStatus.OUT_OF_MEMORY, _reason(cause), _requested_bytes(str(cause)))
    if isinstance(error, _UNSUPPORTED_ERRORS) and not began_training:
        return ClassifiedError(ProbeStatus.UNSUPPORTED, reason)
    return ClassifiedError(ProbeStatus.CRASHED, reason)


def _is_out_of_memory(error: BaseException, at_limit: bool) -> bool:
    if _is_device_memory_error(error) or _is_host_memory_error(error):
        return True
    return at_limit and isinstance(error, RuntimeError) and any(words in str(error) for words in _AMBIGUOUS_MESSAGES)


def _is_device_memory_error(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in _DEVICE_MEMORY_MESSAGES)


def _is_host_memory_error(error: BaseException) -> bool:
    """Whether host memory ran out, which on a CPU is the device's."""
    if _is_device_memory_error(error):
        return False
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    return any(words in str(error) for words in _HOST_MEMORY_MESSAGES)


def _requested_bytes(text: str) -> int | None:
    match = _REQUESTED.search(text)
    return parse_size(match[1].replace("bytes", "B")) if match is not None else None


def _reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()][:_REASON_LINES]
    kind = [] if isinstance(error, AutotuneError) else [type(error).__name__]
    parts = [*kind, *([hidden(" ".join(lines))] if lines else [])]
    return ": ".join(parts)[:_REASON_CHARACTERS]
