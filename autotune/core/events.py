"""The events that a run sends to its listener; the report displays them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autotune.core.candidate import Candidate

if TYPE_CHECKING:
    # The help of every command comes through here.
    from autotune.core.estimate import Estimate
    from autotune.core.measurement import Measurement
    from autotune.core.workload import Workload

ONCE_MORE = ("confirmation", "comparison")
"""Purposes of probes that run a candidate once more, under the number that it has."""


@dataclass(frozen=True)
class StageStarted:
    """A new part of the run began, such as tokenising or searching; ``text`` describes it to the user."""

    text: str


TRACING = StageStarted("Tracing training steps with no GPU")
"""The stage in which a plan, a check or an estimate is traced."""


@dataclass(frozen=True)
class WorkloadReady:
    """The model and the dataset have been read, and the search space has been built.

    Attributes:
        candidates: number of candidates in the search space.
        baseline: TRL's default, or the user's own configuration; a candidate is displayed by its differences from it.
        own: whether it is the user's own.
    """

    workload: Workload
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
        purpose: ``baseline``, ``recipe``, ``search``, ``contribution``, ``audit``, ``confirmation`` or ``comparison``;
            the limit does not count the last three.
        trials_limit: most probes, those of earlier runs included.
        seconds_left: until the search's time limit; None: it has none.
    """

    number: int
    candidate: Candidate
    purpose: str
    trials_limit: int
    seconds_left: float | None = None


@dataclass(frozen=True)
class ProbeFinished:
    """A probe ended. ``best`` is whether it is the fastest candidate that fits, so far."""

    number: int
    candidate: Candidate
    purpose: str
    measurement: Measurement
    best: bool


@dataclass(frozen=True)
class ProbeLost:
    """A running probe is lost with its worker; another worker repeats it under another number."""

    number: int


@dataclass(frozen=True)
class StudyResumed:
    """A study that holds candidates already is continued.

    Attributes:
        probes: number of probes that the limit counts.
        vetoed: number of candidates that were decided without a probe.
        trials_limit: most probes, these included.
        best: the run of the fastest candidate that fits, so far; None if none fits.
    """

    probes: int
    vetoed: int
    trials_limit: int
    best: ProbeFinished | None


@dataclass(frozen=True)
class Tracing:
    """Traces are being run.

    Attributes:
        done: traces that are known.
        expected: about how many there will be, these included.
        remaining_seconds: about how long the others take, by the pace so far; None where that is not known.
    """

    done: int
    expected: int
    remaining_seconds: float | None = None


@dataclass(frozen=True)
class Ranked:
    """There is a provisional ranking of the candidates that were traced so far.

    Attributes:
        best: the first of them, the best first.
        baseline: a candidate is displayed by its differences from it.
    """

    best: tuple[Estimate, ...]
    baseline: Candidate


@dataclass(frozen=True)
class CandidateVetoed:
    """A candidate was decided without a probe."""

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
    | ProbeLost
    | CandidateVetoed
    | Tracing
    | Ranked
)
Listener = Callable[[Event], None]


def without(listener: Listener, *kinds: type[Event]) -> Listener:
    """Return a listener that passes on all events but those of some kinds."""
    return lambda event: None if isinstance(event, kinds) else listener(event)


def ignore(event: Event) -> None:
    """Discard the event."""
