"""A search problem whose probes are replayed from a table of formulas, without training or measuring."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from autotune.core.candidate import Candidate, Choice
from autotune.core.measurement import Measurement, OutOfMemory, Schedule
from autotune.core.program import BACKWARD
from autotune.core.status import ProbeStatus
from autotune.study.problem import ProbeRun

LIMIT_BYTES = 600
STATE_BYTES = 200
BYTES_PER_ROW = 100

SPEED: Mapping[str, Mapping[Choice, float]] = {
    "batch": {1: 1.0, 2: 1.7, 4: 2.5, 8: 3.1, 16: 3.4},
    "checkpointing": {"off": 1.0, "on": 0.75},
    "packing": {"none": 1.0, "wrapped": 1.45, "bfd": 1.6, "bfd_split": 1.6},
    "attention": {"eager": 1.0, "sdpa": 1.3, "flash": 1.5},
    "liger": {"off": 1.0, "on": 1.08},
}
"""What each choice multiplies the token rate by."""

MEMORY: Mapping[str, Mapping[Choice, float]] = {
    "batch": {1: 1, 2: 2, 4: 4, 8: 8, 16: 16},
    "checkpointing": {"off": 1.0, "on": 0.4},
    "packing": {"none": 1.0, "wrapped": 1.2, "bfd": 1.2, "bfd_split": 1.2},
    "attention": {"eager": 2.0, "sdpa": 1.2, "flash": 1.0},
    "liger": {"off": 1.0, "on": 0.7},
}
"""What each choice multiplies the memory of a row by."""

BASELINE = Candidate(
    {"batch": 8, "checkpointing": "on", "packing": "none", "attention": "sdpa", "liger": "off", "precision": "bf16"}
)


@dataclass
class TableProblem:
    """240 spellings of 200 candidates, of which 140 are legal and come to 120 plans; 73 of those fit.

    Attributes:
        forbidden: by knob, a choice that is illegal.
        fixed: by knob, its only choice.
    """

    baseline: Candidate = BASELINE
    recipes: Sequence[Candidate] = ()
    memory_ordered: frozenset[str] = frozenset({"batch"})
    time_ordered: frozenset[str] = frozenset({"batch"})
    forbidden: Mapping[str, Choice] = field(default_factory=dict)
    fixed: Mapping[str, Choice] = field(default_factory=dict)

    @property
    def choices(self) -> Mapping[str, tuple[Choice, ...]]:
        """Every knob's choices, with one that is fixed."""
        free = {knob: tuple(factors) for knob, factors in SPEED.items()}
        return {**free, "precision": ("bf16",), **{knob: (choice,) for knob, choice in self.fixed.items()}}

    def normal(self, candidate: Candidate) -> Candidate:
        """Liger does nothing to eager attention here."""
        return candidate.but(liger="off") if candidate["attention"] == "eager" else candidate

    def identity(self, candidate: Candidate) -> str:
        """Nothing is ever split here."""
        plan = candidate.but(packing="bfd") if candidate["packing"] == "bfd_split" else candidate
        return repr(sorted(plan.items()))

    def accumulates(self, candidate: Candidate) -> bool:
        """No candidate has gradients while a micro-batch runs."""
        return False

    def illegal(self, candidate: Candidate) -> str | None:
        """Packing needs flash attention, and whatever a test forbids."""
        if str(candidate["packing"]).startswith("bfd") and candidate["attention"] != "flash":
            return "packing needs flash attention"
        wrong = [
            f"{knob} {choice} is forbidden" for knob, choice in self.forbidden.items() if candidate[knob] == choice
        ]
        return wrong[0] if wrong else None

    def knobs_of_violated_rule(self, candidate: Candidate) -> Collection[str]:
        """Any knob."""
        return candidate

    def everything(self) -> list[Candidate]:
        """Every candidate in its normal form, illegal ones included."""
        combinations = itertools.product(*self.choices.values())
        spelled = (Candidate(dict(zip(self.choices, picked, strict=True))) for picked in combinations)
        return list(dict.fromkeys(self.normal(candidate) for candidate in spelled))


def peak_bytes(candidate: Candidate) -> int:
    """The memory need of a candidate in the table."""
    factor = 1.0
    for knob, factors in MEMORY.items():
        factor *= factors[candidate[knob]]
    return int(STATE_BYTES + BYTES_PER_ROW * factor)


def tokens_per_second(candidate: Candidate) -> float:
    """The rate of a candidate in the table, if it fits."""
    rate = 1000.0
    for knob, factors in SPEED.items():
        rate *= factors[candidate[knob]]
    return rate


def measurement(candidate: Candidate, limit_bytes: int = LIMIT_BYTES) -> Measurement:
    """What the table shows for a candidate."""
    peak = peak_bytes(candidate)
    if peak > limit_bytes:
        oom = OutOfMemory(BACKWARD, peak - STATE_BYTES, STATE_BYTES, limit_bytes)
        return Measurement(ProbeStatus.OUT_OF_MEMORY, f"needs {peak} bytes", out_of_memory=oom)
    return Measurement(ProbeStatus.OK, peak_bytes=peak, tokens_per_second=tokens_per_second(candidate))


@dataclass
class ReplayedTable:
    """A probe that answers from the table, and remembers what it was asked.

    Attributes:
        shown: by candidate and schedule, or by candidate for any schedule, what is shown in place of the table.
        runs: every run that was asked for.
    """

    limit_bytes: int = LIMIT_BYTES
    shown: dict[Candidate | tuple[Candidate, Schedule], Measurement] = field(default_factory=dict)
    runs: list[ProbeRun] = field(default_factory=list)

    @property
    def calls(self) -> list[tuple[int, Candidate, Schedule]]:
        """Number, candidate and schedule of every run."""
        return [(run.number, run.candidate, run.schedule) for run in self.runs]

    def __call__(self, run: ProbeRun, seconds_left: float | None) -> Measurement:
        """Answer a probe."""
        self.runs.append(run)
        special = self.shown.get((run.candidate, run.schedule), self.shown.get(run.candidate))
        return special or measurement(run.candidate, self.limit_bytes)
