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
    """How a whole run of ``autotune probe`` ended.

    Attributes:
        FAILED: no candidate can be recommended, and none that was probed lacked memory: probes crashed, could not run,
            or ran what may not be recommended.
        UNDECIDED: a limit ended the search before any probe decided whether a candidate fits that may be recommended.
        INTERRUPTED: the user, or a signal, ended it.
    """

    FOUND = "found"
    NOTHING_FITS = "nothing_fits"
    FAILED = "failed"
    UNDECIDED = "undecided"
    INTERRUPTED = "interrupted"


class Ending(StrEnum):
    """The reason why the search ended.

    Attributes:
        NO_GAIN: by any candidate left.
        SAMPLED: the space is too large to enumerate.
        EXHAUSTED: no candidate was left.
    """

    TIME = "the time limit"
    TRIALS = "the trial limit"
    NO_GAIN = "an expected gain below 1 %"
    PATIENCE = "a row of 24 traced candidates that do not fit"
    SAMPLED = "a random sample of the space with none left to probe"
    EXHAUSTED = "exhausted"
