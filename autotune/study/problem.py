"""The inputs and results of a search, for any kind of candidates."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from autotune.core.candidate import Candidate, Choice
from autotune.core.documents.result import Contribution, Smallest
from autotune.core.measurement import Measurement, Schedule
from autotune.core.prediction import Prediction
from autotune.core.spread import Interval, mean_rate, prediction_interval
from autotune.core.status import Ending, ProbeStatus


class Problem(Protocol):
    """The candidates of a search and the rules between them."""

    @property
    def choices(self) -> Mapping[str, tuple[Choice, ...]]:
        """The choices of every knob, fixed knobs included: the sampler's categorical distributions."""

    @property
    def baseline(self) -> Candidate:
        """The candidate to compare with: always probed first, recommended only if it is legal."""

    @property
    def recipes(self) -> Sequence[Candidate]:
        """Documented candidates that are tried before the sampler's; illegal ones are vetoed."""

    @property
    def memory_ordered(self) -> frozenset[str]:
        """Knobs whose larger integer choice never needs less memory, all else equal, unless it ends accumulation."""

    @property
    def time_ordered(self) -> frozenset[str]:
        """Knobs whose larger integer choice never takes a probe less time, all else equal."""

    def normal(self, candidate: Candidate) -> Candidate:
        """Return the representative of all candidates that are equivalent to this one."""

    def identity(self, candidate: Candidate) -> str:
        """Return a string that is equal for candidates with the same plan; called for legal ones and the baseline."""

    def accumulates(self, candidate: Candidate) -> bool:
        """Whether an optimizer step has several micro-batches, so that gradients exist while a micro-batch runs."""

    def illegal(self, candidate: Candidate) -> str | None:
        """Return a description of why a candidate must not be recommended, or None if it may."""

    def knobs_of_violated_rule(self, candidate: Candidate) -> Collection[str]:
        """Return the knobs of the violated rule, one of which has to change; called for illegal candidates."""


class Purpose(StrEnum):
    """Why a candidate was run or vetoed."""

    BASELINE = "baseline"
    RECIPE = "recipe"
    SEARCH = "search"
    CONTRIBUTION = "contribution"
    CONFIRMATION = "confirmation"
    COMPARISON = "comparison"


@dataclass(frozen=True)
class ComparisonTurn:
    """One short run in a comparison of a winner with the baseline.

    Attributes:
        winner: number of the trial that is compared with the baseline.
        number: number of the trial that runs: the winner's or the baseline's.
        pair: index of the pair, from 0; a winner's run and the baseline's run with the same index form a pair.
    """

    winner: int
    number: int
    pair: int


@dataclass(frozen=True)
class ProbeRun:
    """One run of a trial's candidate; no two finished runs of a study are equal.

    Attributes:
        number: number of the trial.
        turn: the turn of a comparison; None for every other purpose.
        expected_seconds: expected duration, from the candidate's probe; 0 if unknown. Whole steps of a large global
            batch take longer than any probe.
    """

    number: int
    candidate: Candidate
    purpose: Purpose
    schedule: Schedule
    turn: ComparisonTurn | None = None
    expected_seconds: float = 0.0


Probe = Callable[[ProbeRun, float | None], Measurement]
"""Runs a probe, given the run and the remaining seconds (None: no limit), and returns its measurement.

It raises only ``KeyboardInterrupt`` and ``AutotuneError``.
"""


@dataclass(frozen=True)
class Sharing:
    """Settings of the leases with which processes that share a study detect each other's death.

    If a writer of a JournalStorage is killed, Optuna removes its lock after 30 s, during which no process can write: a
    lease has to be longer.

    Attributes:
        interval_seconds: time between two renewals of a worker's lease.
        missed: number of successive missed renewals after which other workers consider a worker dead.
        poll_seconds: polling interval of a worker that waits for others.
        patience_seconds: time for which calls of a failing storage are retried.
    """

    interval_seconds: float = 10.0
    missed: int = 6
    poll_seconds: float = 2.0
    patience_seconds: float = 300.0

    @property
    def lease_seconds(self) -> float:
        """Time without a renewal after which a worker loses its trial."""
        return self.interval_seconds * self.missed


@dataclass(frozen=True)
class StudyStorage:
    """The location and identity of a study.

    Attributes:
        url: of a database, in Optuna's format, such as ``sqlite:///study.db``; ``journal:///path`` for Optuna's
            JournalStorage on a file; ``grpc://host:port`` for Optuna's gRPC proxy.
        name: name of the study in that storage.
        resume: whether to continue an existing study.
        fingerprint: named parts that have to be equal to continue or join a study: workload, hardware, software, …;
            messages about a difference show their values.
    """

    url: str
    name: str
    resume: bool
    fingerprint: Mapping[str, str]
    sharing: Sharing = Sharing()


@dataclass(frozen=True)
class ShortRun:
    """One run of a comparison: number of the trial that ran, the winner's or the baseline's, and the measurement."""

    number: int
    measurement: Measurement


@dataclass(frozen=True)
class Record:
    """One trial of the study.

    Attributes:
        number: the Optuna trial's number.
        candidate: the candidate in its normal form.
        measurement: measurement of its probe; for a vetoed candidate only status and reason.
        confirmation: measurement of the longer run, or None if there was none.
        prediction: the prediction at the time of the probe or veto, or None.
        comparison: the short runs of this candidate and of the baseline, in the order in which they ran.
    """

    number: int
    candidate: Candidate
    purpose: Purpose
    measurement: Measurement
    confirmation: Measurement | None = None
    prediction: Prediction | None = None
    comparison: tuple[ShortRun, ...] = ()

    @property
    def probed(self) -> bool:
        """Whether a probe ran, with any result."""
        return self.measurement.status is not ProbeStatus.VETOED

    @property
    def runs(self) -> tuple[Measurement, ...]:
        """The measurements after its probe: of its longer run, then of its short ones."""
        longer = () if self.confirmation is None else (self.confirmation,)
        return (*longer, *(run.measurement for run in self.comparison if run.number == self.number))

    @property
    def failure(self) -> Measurement | None:
        """The first run after its probe that did not end ``ok``, or None."""
        return next((run for run in self.runs if not run.ok), None)

    @property
    def confirmed(self) -> bool:
        """Whether the longer run ended ``ok``, and every short one so far."""
        return self.confirmation is not None and self.failure is None

    @property
    def rates(self) -> tuple[float, ...]:
        """The token rates of its longer run and its short ones, as far as they ended ``ok``."""
        return _rates(self.runs)

    @property
    def baseline_rates(self) -> tuple[float, ...]:
        """The token rates of the baseline's short runs that alternated with its own."""
        return _rates(run.measurement for run in self.comparison if run.number != self.number)

    @property
    def prediction_interval(self) -> Interval | None:
        """The interval of the rate of a further run; None for fewer than two runs after its probe."""
        return prediction_interval(self.rates, self.baseline_rates)

    @property
    def tokens_per_second(self) -> float:
        """The mean rate of the runs after its probe, else the probe's; 0 for a candidate that never trained."""
        return mean_rate(self.rates) if self.rates else self.measurement.tokens_per_second or 0.0


def _rates(runs: Iterable[Measurement]) -> tuple[float, ...]:
    return tuple(run.tokens_per_second for run in runs if run.ok and run.tokens_per_second)


@dataclass(frozen=True)
class SearchOutcome:
    """The result of a search.

    Attributes:
        records: every trial in the order of their numbers, earlier runs of a resumed study included.
        baseline: the baseline's record; None if it was not reached.
        winner: the recommended record; None if nothing legal fits, or nothing was measured yet.
        failed_confirmations: the records with a run after the probe that did not end ``ok``, including the baseline's
            runs in comparisons.
        contributions: contribution of each of the winner's choices; empty without a winner.
        confirmed: whether the winner's longer run and all short runs ended ``ok``.
        interrupted: whether the user ended the search.
        ending: what ended the search for further candidates; None if the user did.
        smallest: the candidate with the smallest predicted need, if nothing is recommended, needs are predicted, and
            there was time to find it.
    """

    records: tuple[Record, ...]
    baseline: Record | None
    winner: Record | None
    failed_confirmations: tuple[Record, ...]
    contributions: tuple[Contribution, ...]
    confirmed: bool
    interrupted: bool
    ending: Ending | None = None
    smallest: Smallest | None = None
