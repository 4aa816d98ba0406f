"""The statuses that a probe, a candidate and a whole run can end with."""

from __future__ import annotations

from enum import StrEnum


class ProbeStatus(StrEnum):
    """How one candidate ended. All but ``VETOED`` are results of a probe."""

    OK = "ok"
    OUT_OF_MEMORY = "out_of_memory"
    HOST_OUT_OF_MEMORY = "host_out_of_memory"
    TIMEOUT = "timeout"
    UNSUPPORTED = "unsupported"
    CRASHED = "crashed"
    VETOED = "vetoed"


OUT_OF_MEMORY = frozenset({ProbeStatus.OUT_OF_MEMORY, ProbeStatus.HOST_OUT_OF_MEMORY})
"""The statuses of a probe that needed more memory than there was, on the device or on the host."""


class RunStatus(StrEnum):
    """How a whole run of ``autotune probe`` ended."""

    FOUND = "found"
    NOTHING_FITS = "nothing_fits"
    INTERRUPTED = "interrupted"


class Ending(StrEnum):
    """The reason why the search ended; ``EXHAUSTED``: no candidate was left."""

    TIME = "the time limit"
    TRIALS = "the trial limit"
    PATIENCE = "patience"
    EXHAUSTED = "exhausted"
