"""The events that a run reports to its listener, such as a finished probe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autotune.core.candidate import Candidate

if TYPE_CHECKING:
    # The help of every command comes through here.
    from autotune.core.documents.estimate import Estimate
    from autotune.core.machine import Hardware
    from autotune.core.measurement import Measurement
    from autotune.core.workload import Workload

REPEATED = ("confirmation", "comparison")
"""Purposes of probes that run a candidate again, under its earlier number."""


@dataclass(frozen=True)
class StageStarted:
    """A new part of the run began, such as tokenising or searching; ``text`` describes it to the user."""

    text: str


TRACING = StageStarted("Tracing training steps with no GPU")
"""The tracing stage of a plan, a check or an estimate."""


@dataclass(frozen=True)
class WorkloadReady:
    """The model and the dataset have been read, and the search space has been built.

    Attributes:
        hardware: the device that probes run on.
        candidates: number of candidates in the search space.
        baseline: TRL's default, or the user's own configuration; candidates are displayed as differences from it.
        own: whether the baseline is the user's own.
    """

    workload: Workload
    hardware: Hardware
    budget_bytes: int
    candidates: int
    baseline: Candidate = field(default_factory=lambda: Candidate({}))
    own: bool = False


@dataclass(frozen=True)
class Noted:
    """Information for the user that requires no action."""

    text: str


@dataclass(frozen=True)
class ProbeStarted:
    """A probe began.

    Attributes:
        purpose: ``baseline``, ``recipe``, ``search``, ``contribution``, ``confirmation`` or ``comparison``; the limit
            does not count the last two.
        trials_limit: maximum number of probes, those of earlier runs included.
    """

    number: int
    candidate: Candidate
    purpose: str
    trials_limit: int


@dataclass(frozen=True)
class ProbeFinished:
    """A probe ended; ``best``: its candidate is the fastest so far that fits."""

    number: int
    candidate: Candidate
    purpose: str
    measurement: Measurement
    best: bool


@dataclass(frozen=True)
class StudyResumed:
    """A study with finished candidates is continued.

    Attributes:
        probes: number of probes that count towards the limit.
        vetoed: number of candidates rejected without a probe.
        trials_limit: maximum number of probes, these included.
        best: the run of the fastest candidate so far that fits; None if none fits.
    """

    probes: int
    vetoed: int
    trials_limit: int
    best: ProbeFinished | None


@dataclass(frozen=True)
class Tracing:
    """Progress of traces.

    Attributes:
        done: number of finished traces.
        expected: estimated total.
        remaining_seconds: estimated time for the others, by the pace so far; None if it is not known.
    """

    done: int
    expected: int
    remaining_seconds: float | None = None


@dataclass(frozen=True)
class Ranked:
    """A provisional ranking of the candidates traced so far.

    Attributes:
        best: the first few, the best first.
        baseline: candidates are displayed as differences from it.
    """

    best: tuple[Estimate, ...]
    baseline: Candidate


@dataclass(frozen=True)
class CandidateVetoed:
    """A candidate was rejected without a probe."""

    number: int
    candidate: Candidate
    reason: str


Event = (
    StageStarted
    | WorkloadReady
    | Noted
    | StudyResumed
    | ProbeStarted
    | ProbeFinished
    | CandidateVetoed
    | Tracing
    | Ranked
)
Listener = Callable[[Event], None]


def ignore(event: Event) -> None:
    """Discard the event."""
