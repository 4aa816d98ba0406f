"""Reads from the trials of a study which probes run at this moment, and which were begun and not finished."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from optuna.trial import FrozenTrial, TrialState

from autotune.core.candidate import Candidate
from autotune.study.problem import Purpose
from autotune.study.trial_documents import candidate_of, purpose_of

WORKER, PLAN, CLAIM = "autotune:worker", "autotune:plan", "autotune:claim"
"""System attributes of a trial: who runs it, what is equal for candidates with the same plan, and the attempt."""

WITHDRAWN, LOST = "autotune:withdrawn", "autotune:lost"
"""System attributes of a failed trial: it was another worker's to run; its worker is gone."""

DEATHS = 3
"""Workers that may be lost while they probe one candidate; after that it is not tried again."""


@dataclass(frozen=True)
class Unfinished:
    """A candidate whose probe was cut off by the end of the process that ran it.

    Attributes:
        deaths: how many workers were lost while they probed it: killed, or without a sign of life.
    """

    candidate: Candidate
    purpose: Purpose
    deaths: int


@dataclass(frozen=True)
class Running:
    """A trial that a worker probes at this moment.

    Attributes:
        plan: equal for candidates with the same plan.
        claim: names the attempt to create the trial.
    """

    number: int
    candidate: Candidate
    purpose: Purpose
    worker: str
    plan: str
    claim: str


def running(trial: FrozenTrial) -> list[Running]:
    """Return an open trial as what it probes; nothing for one that somebody else has added."""
    candidate = candidate_of(trial)
    if candidate is None:
        return []
    found = trial.system_attrs
    return [Running(trial.number, candidate, purpose_of(trial), found[WORKER], found[PLAN], found[CLAIM])]


def cut_off(trials: Sequence[FrozenTrial], known: Collection[Candidate]) -> list[Unfinished]:
    """Return what was begun and not finished.

    Args:
        known: candidates that have a record, or run.
    """
    found: dict[Candidate, Purpose] = {}
    deaths: Counter[Candidate] = Counter()
    for trial in trials:
        candidate = candidate_of(trial) if trial.state is TrialState.FAIL else None
        if candidate is not None and candidate not in known and WITHDRAWN not in trial.system_attrs:
            found[candidate] = purpose_of(trial)
            deaths[candidate] += LOST in trial.system_attrs
    return [Unfinished(candidate, purpose, deaths[candidate]) for candidate, purpose in found.items()]
