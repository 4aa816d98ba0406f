"""What a search is given and what it hands back; it knows a problem's candidates, not what they mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from autotune.core.candidate import Candidate, Choice
from autotune.core.measurement import Measurement, Schedule
from autotune.core.result import Contribution
from autotune.core.status import ProbeStatus
from autotune.study.prediction import Prediction


class Problem(Protocol):
    """The candidates of a search and the rules between them."""

    @property
    def choices(self) -> Mapping[str, tuple[Choice, ...]]:
        """Every knob's choices, a fixed knob's only one included: the sampler's categorical distributions."""

    @property
    def baseline(self) -> Candidate:
        """The candidate to compare with: always probed first, recommended only where it is legal."""

    @property
    def recipes(self) -> Sequence[Candidate]:
        """Documented candidates that are tried before the sampler is asked; those that are illegal here are vetoed."""

    @property
    def ordered(self) -> frozenset[str]:
        """Knobs whose larger integer choice never needs less memory, all else equal."""

    def normal(self, candidate: Candidate) -> Candidate:
        """Return the one that stands for all candidates that are the same as this one."""

    def identity(self, candidate: Candidate) -> str:
        """Return a text that is equal for candidates that come to one plan; asked of legal ones and the baseline."""

    def illegal(self, candidate: Candidate) -> str | None:
        """Return why a candidate must not be recommended, in words, or None when it may."""


Probe = Callable[[int, Candidate, Schedule, float | None], Measurement]
"""Trial number, candidate, schedule and the seconds that are left (None: no limit) to what the probe showed.

It raises nothing but ``KeyboardInterrupt`` and ``AutotuneError``.
"""


class Purpose(StrEnum):
    """Why a candidate was probed or vetoed."""

    BASELINE = "baseline"
    RECIPE = "recipe"
    SEARCH = "search"
    CONTRIBUTION = "contribution"
    AUDIT = "audit"
    CONFIRMATION = "confirmation"


@dataclass(frozen=True)
class StudyStorage:
    """Where a study is kept.

    Attributes:
        url: any storage URL that Optuna takes, such as ``sqlite:///study.db``.
        name: of the study in that storage.
        resume: whether an existing study is to be continued.
        fingerprint: named parts that have to be equal for a study to be continued: workload, hardware, software, ….
    """

    url: str
    name: str
    resume: bool
    fingerprint: Mapping[str, str]


@dataclass(frozen=True)
class Record:
    """One trial of the study.

    Attributes:
        number: the Optuna trial's number.
        candidate: in its normal form.
        measurement: what its probe showed; for a vetoed candidate only status and reason.
        confirmation: what the longer run showed, or None when there was none.
        prediction: what was predicted when it was probed or vetoed; None where nothing was.
    """

    number: int
    candidate: Candidate
    purpose: Purpose
    measurement: Measurement
    confirmation: Measurement | None = None
    prediction: Prediction | None = None

    @property
    def probed(self) -> bool:
        """Whether a probe ran, whatever it showed."""
        return self.measurement.status is not ProbeStatus.VETOED

    @property
    def confirmed(self) -> bool:
        """Whether the longer run ended ``ok``."""
        return self.confirmation is not None and self.confirmation.ok

    @property
    def tokens_per_second(self) -> float:
        """The token rate of the longest run that ended ``ok``; 0 for a candidate that never trained."""
        shown = self.confirmation if self.confirmation is not None and self.confirmation.ok else self.measurement
        return shown.tokens_per_second or 0.0


@dataclass(frozen=True)
class SearchOutcome:
    """What a search found.

    Attributes:
        records: every trial in the order of their numbers, earlier runs of a resumed study included.
        baseline: None when it was not reached.
        winner: the recommended one; None when nothing legal fits, or nothing was measured yet.
        failed_confirmations: the records whose longer run did not end ``ok``.
        contradicted: the records of candidates that were predicted not to fit, were probed all the same, and fit.
        contributions: what each choice of the winner brought; empty when there is no winner.
        confirmed: whether the winner passed the longer run.
        interrupted: whether the user ended the search before it was done.
    """

    records: tuple[Record, ...]
    baseline: Record | None
    winner: Record | None
    failed_confirmations: tuple[Record, ...]
    contributions: tuple[Contribution, ...]
    confirmed: bool
    interrupted: bool
    contradicted: tuple[Record, ...] = ()
