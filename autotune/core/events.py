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
        probes_done: probes that a resumed study holds already.
    """

    workload: Workload
    budget_bytes: int
    candidates: int
    baseline: Candidate = field(default_factory=lambda: Candidate({}))
    probes_done: int = 0


@dataclass(frozen=True)
class Noted:
    """Something that the user should know and need not act on, or may."""

    text: str


@dataclass(frozen=True)
class ProbeStarted:
    """A probe began.

    Attributes:
        purpose: ``baseline``, ``recipe``, ``search``, ``contribution``, ``audit`` or ``confirmation``.
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
class CandidateVetoed:
    """A candidate was decided without a probe."""

    number: int
    candidate: Candidate
    reason: str


Event = StageStarted | WorkloadReady | Noted | ProbeStarted | ProbeFinished | CandidateVetoed
Listener = Callable[[Event], None]


def ignore(event: Event) -> None:
    """Listen to nothing."""
