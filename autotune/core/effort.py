"""The levels of ``--effort``: how many candidates a search tries, and how long each probe trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autotune.core.measurement import Schedule

EffortName = Literal["quick", "normal", "thorough"]


@dataclass(frozen=True)
class Effort:
    """The limits of a search.

    Attributes:
        trials: maximum number of probes, including contributions, excluding confirmation.
        patience: the search ends when the expected improvement was below 1 % before this many successive probes.
        probe: schedule of a search probe.
        confirmation: schedule of the longer run that a winner must pass.
        comparison: schedule of the short runs that alternate between the winner and the baseline afterwards.
        comparisons: number of short runs of each of the two; up to twice as many where their rates scatter. The
            promised rate, the speed-up and their intervals are computed from the spread between runs.
        probe_timeout_seconds: time after which a probe is killed.
        planning_seconds: time limit for traces before the first probe. In replayed searches, 12 traced candidates were
            as good as 24, since other candidates are traced before their probes.
    """

    trials: int
    patience: int
    probe: Schedule
    confirmation: Schedule
    comparison: Schedule
    comparisons: int
    probe_timeout_seconds: float
    planning_seconds: float


EFFORTS: dict[str, Effort] = {
    "quick": Effort(
        trials=24,
        patience=2,
        probe=Schedule(min_seconds=1.0, max_seconds=3.0, target_error=0.05),
        confirmation=Schedule(whole_steps=True, worst_last=True, saves=True, max_seconds=6.0, target_error=0.02),
        comparison=Schedule(timing_only=True, min_seconds=1.0, max_seconds=3.0, target_error=0.02),
        comparisons=4,
        probe_timeout_seconds=300.0,
        planning_seconds=12.0,
    ),
    "normal": Effort(
        trials=40,
        patience=4,
        probe=Schedule(min_seconds=2.0, max_seconds=10.0, target_error=0.03),
        confirmation=Schedule(whole_steps=True, worst_last=True, saves=True, max_seconds=15.0, target_error=0.01),
        comparison=Schedule(timing_only=True, min_seconds=2.0, max_seconds=6.0, target_error=0.01),
        comparisons=5,
        probe_timeout_seconds=600.0,
        planning_seconds=30.0,
    ),
    "thorough": Effort(
        trials=150,
        patience=12,
        probe=Schedule(min_micro_batches=12, min_seconds=4.0, max_seconds=30.0, target_error=0.02),
        confirmation=Schedule(whole_steps=True, worst_last=True, saves=True, max_seconds=60.0, target_error=0.01),
        comparison=Schedule(
            timing_only=True,
            min_micro_batches=12,
            min_seconds=4.0,
            max_seconds=15.0,
            target_error=0.01,
        ),
        comparisons=8,
        probe_timeout_seconds=1200.0,
        planning_seconds=120.0,
    ),
}
