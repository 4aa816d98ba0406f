"""Effort levels as data: how many candidates a search tries, and how long each of its probes trains."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.core.measurement import Schedule


@dataclass(frozen=True)
class Effort:
    """How much a search may spend.

    Attributes:
        name: what ``--effort`` calls it.
        trials: probes at the most, contributions included, audits and confirmation excluded.
        patience: probes in a row without a better candidate after which nothing promising is left.
        probe: schedule of a search probe.
        confirmation: schedule of the longer run that a winner has to pass.
        probe_timeout_seconds: after which a probe is ended.
        planning_seconds: what predicting may take before the first probe.
        audits: candidates that are predicted not to fit and probed all the same, beside the trials, to hold the
            predictions against the truth.
    """

    name: str
    trials: int
    patience: int
    probe: Schedule
    confirmation: Schedule
    probe_timeout_seconds: float
    planning_seconds: float
    audits: int = 0


EFFORTS: dict[str, Effort] = {
    "quick": Effort(
        name="quick",
        trials=16,
        patience=6,
        probe=Schedule(worst_steps=2, warmup_steps=1, min_steps=3, max_seconds=3.0, target_error=0.05),
        confirmation=Schedule(worst_steps=2, warmup_steps=1, min_steps=6, max_seconds=10.0, target_error=0.02),
        probe_timeout_seconds=300.0,
        planning_seconds=30.0,
    ),
    "normal": Effort(
        name="normal",
        trials=40,
        patience=12,
        probe=Schedule(worst_steps=2, warmup_steps=2, min_steps=5, max_seconds=10.0, target_error=0.03),
        confirmation=Schedule(worst_steps=3, warmup_steps=2, min_steps=10, max_seconds=30.0, target_error=0.01),
        probe_timeout_seconds=600.0,
        planning_seconds=60.0,
    ),
    "thorough": Effort(
        name="thorough",
        trials=150,
        patience=40,
        probe=Schedule(worst_steps=3, warmup_steps=3, min_steps=8, max_seconds=30.0, target_error=0.02),
        confirmation=Schedule(worst_steps=4, warmup_steps=3, min_steps=20, max_seconds=120.0, target_error=0.01),
        probe_timeout_seconds=1200.0,
        planning_seconds=180.0,
        audits=4,
    ),
}
