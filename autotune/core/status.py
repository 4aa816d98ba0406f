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
        UNDECIDED: a limit ended the search before any probe decided whether a candidate fits that may be recommended.
        INTERRUPTED: the user, or a signal, ended it.
    """

    FOUND = "found"
    NOTHING_FITS = "nothing_fits"
    UNDECIDED = "undecided"
    INTERRUPTED = "interrupted"


class Ending(StrEnum):
    """The reason why the search ended.

    Attributes:
        NO_GAIN: the expected improvement by any candidate left is below 1 %.
        PATIENCE: 24 candidates in a row were traced, and none of them fits.
        SAMPLED: of a space too large to enumerate, many random candidates were examined, and none was left to probe.
        EXHAUSTED: no candidate was left.
    """

    TIME = "the time limit"
    TRIALS = "the trial limit"
    NO_GAIN = "no expected gain"
    PATIENCE = "patience"
    SAMPLED = "a random sample without another"
    EXHAUSTED = "exhausted"
