"""The statuses of a probe, of a candidate and of a whole run, and the reasons why a search ended."""

from __future__ import annotations

from enum import StrEnum


class ProbeStatus(StrEnum):
    """The status of a candidate; all but ``VETOED`` are results of a probe."""

    OK = "ok"
    OUT_OF_MEMORY = "out_of_memory"
    HOST_OUT_OF_MEMORY = "host_out_of_memory"
    TIMEOUT = "timeout"
    UNSUPPORTED = "unsupported"
    CRASHED = "crashed"
    VETOED = "vetoed"


OUT_OF_MEMORY = frozenset({ProbeStatus.OUT_OF_MEMORY, ProbeStatus.HOST_OUT_OF_MEMORY})
"""The statuses of a probe that ran out of memory, on the device or on the host."""


class RunStatus(StrEnum):
    """The status of a run of ``autotune probe``.

    Attributes:
        FAILED: no candidate can be recommended, and none lacked memory: probes crashed, could not run, or their
            candidates may not be recommended.
        UNDECIDED: a limit ended the search before any probe showed whether a candidate that may be recommended fits.
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
        NO_GAIN: the expected gain of every candidate left is below 1 %.
        SAMPLED: the space is too large to enumerate, and its sample is probed.
        EXHAUSTED: no candidate was left.
    """

    TIME = "the time limit"
    TRIALS = "the limit of probes"
    NO_GAIN = "an expected gain below 1 %"
    PATIENCE = "a row of 24 traced candidates that do not fit"
    SAMPLED = "a random sample of the space with none left to probe"
    EXHAUSTED = "exhausted"
