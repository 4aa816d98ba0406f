"""Classifies a probe without a readable reply by its process's exit and the end of its log."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from autotune.core.machine import DeviceKind
from autotune.core.measurement import Measurement
from autotune.core.status import ProbeStatus
from autotune.probing.channel import signal_name
from autotune.probing.server import JobExit
from autotune.units import format_bytes, format_duration

# Message of libstdc++ for an uncaught allocation failure.
_BAD_ALLOC = "std::bad_alloc"
# Message of libraries, such as bitsandbytes, that end the process when CUDA is out of memory.
_DEVICE_OUT_OF_MEMORY = "out of memory"


def classify(
    ending: JobExit, unreadable: str, log: Sequence[str], *, device: DeviceKind, limit_bytes: int | None
) -> Measurement:
    """Return the measurement of a probe without a readable reply.

    Args:
        unreadable: problem of the reply, such as "reply is missing".
        log: the last lines of its log.
        device: the device of the training.
        limit_bytes: the enforced memory limit, or None.
    """
    killer = f"killed by signal {ending.signal} ({signal_name(ending.signal)})"
    if ending.timed_out:
        return Measurement(ProbeStatus.TIMEOUT, f"killed after {format_duration(ending.wall_seconds)}")
    if ending.ran_out_of_memory:
        return Measurement(
            ProbeStatus.HOST_OUT_OF_MEMORY,
            "killed by the kernel, whose control group counts an out-of-memory kill (oom_kill) meanwhile",
        )
    if ending.server_died:
        return Measurement(ProbeStatus.CRASHED, "the process that starts probes died, and this one with it")
    if ending.signal == signal.SIGKILL:
        return Measurement(ProbeStatus.CRASHED, f"{killer}; nothing shows that memory was the cause")
    end = killer if ending.signal else f"ended with exit status {ending.code}"
    log_end = f"; its log ends with {log[-1]!r}" if log else ""
    if not ending.signal and not ending.code:
        return Measurement(ProbeStatus.CRASHED, f"its {unreadable}{log_end}")
    evidence = next((line for line in reversed(log) if _shows_lack_of_memory(line, device, limit_bytes)), None)
    if evidence is None:
        return Measurement(ProbeStatus.CRASHED, f"{end}{log_end}")
    # The budget limits the device's memory, which on a CPU is the host's.
    if device == "cpu" or _DEVICE_OUT_OF_MEMORY in evidence.lower():
        limit = f" under a limit of {format_bytes(limit_bytes)}" if limit_bytes is not None else ""
        return Measurement(ProbeStatus.OUT_OF_MEMORY, f"{end}{limit}; its log has {evidence!r}")
    return Measurement(ProbeStatus.HOST_OUT_OF_MEMORY, f"{end}; its log has {evidence!r}")


def _shows_lack_of_memory(line: str, device: DeviceKind, limit_bytes: int | None) -> bool:
    """Whether a log line reports that memory ran out; on a CPU without a limit, bad_alloc may be an absurd request."""
    if _BAD_ALLOC in line and (device != "cpu" or limit_bytes is not None):
        return True
    return _DEVICE_OUT_OF_MEMORY in line.lower()
