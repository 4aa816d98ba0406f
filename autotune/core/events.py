"""What a run tells whoever watches it, as it happens; the report draws it, the search does not know how."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from autotune.core.candidate import Candidate
from autotune.core.measurement import Measurement
from autotune.core.workload import Workload


@dataclass(frozen=True)
class StageStarted:
    """A new part of the run began, such as tokenising or searching; ``text`` says it to the user."""

    text: str


@dataclass(frozen=True)
class WorkloadReady:
    """The model and the dataset have been read, and the search space stands.

    Attributes:
        candidates: how many the search space holds.
        baseline: TRL's default; a candidate is shown by how it differs from this one.
    """

    workload: Workload
    budget_bytes: int
    candidates: int
    baseline: Candidate = field(default_factory=lambda: Candidate({}))


@dataclass(frozen=True)
class Noted:
    """Something that the user should know and need not act on, or may."""

    text: str


@dataclass(frozen=True)
class ProbeStarted:
    """A probe began.

    Attributes:
        purpose: ``baseline``, ``recipe``, ``search``, ``contribution``, ``audit``, ``confirmation`` or ``comparison``;
            the limit does not count the last three.
        trials_limit: probes at the most, those of earlier runs included.
    """

    number: int
    candidate: Candidate
    purpose: str
    trials_limit: int


@dataclass(frozen=True)
class ProbeFinished:
    """A probe ended. ``best`` tells whether it is the fastest candidate that fits, so far."""

    number: int
    candidate: Candidate
    purpose: str
    measurement: Measurement
    best: bool


@dataclass(frozen=True)
class StudyResumed:
    """A study goes on that holds candidates already.

    Attributes:
        probes: those that the limit counts.
        vetoed: candidates that were decided without a probe.
        trials_limit: probes at the most, these included.
        best: the run that showed the fastest candidate that fits, so far; None where none fits.
    """

    probes: int
    vetoed: int
    trials_limit: int
    best: ProbeFinished | None


@dataclass(frozen=True)
class CandidateVetoed:
    """A candidate was decided without a probe."""

    number: int
    candidate: Candidate
    reason: str


Event = StageStarted | WorkloadReady | Noted | StudyResumed | ProbeStarted | ProbeFinished | CandidateVetoed
Listener = Callable[[Event], None]


def ignore(event: Event) -> None:
    """Listen to nothing."""
