"""Runs a study that finds the fastest candidate that fits."""

from __future__ import annotations

from autotune.core.effort import Effort
from autotune.core.events import Listener
from autotune.core.prediction import NoPredictor, Predictor
from autotune.study.audit import audit, contradicted
from autotune.study.clock import Clock
from autotune.study.contributions import contributions
from autotune.study.explore import explore
from autotune.study.problem import Probe, Problem, SearchOutcome, StudyStorage
from autotune.study.proposals import Proposer
from autotune.study.session import Session
from autotune.study.settle import settle
from autotune.study.storage import opened
from autotune.study.trial_log import TrialLog


def search(
    problem: Problem,
    probe: Probe,
    *,
    effort: Effort,
    memory_limit_bytes: int,
    seed: int,
    trials: int | None,
    timeout_seconds: float | None,
    storage: StudyStorage,
    listener: Listener,
    predictor: Predictor | None = None,
) -> SearchOutcome:
    """Search, attribute and confirm; measurements of earlier runs are kept and not repeated.

    Args:
        memory_limit_bytes: memory that a candidate may need, for the sampler's constraint; the probe enforces it.
        seed: seed of the sampler and of random draws.
        trials: most probes, audits, confirmations and comparisons excluded; None for the effort's.
        timeout_seconds: time limit of this run, confirmation and comparison included; None for no limit.
        predictor: predictions that save probes; None: only probes are used.

    Returns:
        The outcome. ``KeyboardInterrupt`` ends the search early: the outcome so far is returned as interrupted, and
        the probe that was running is repeated when the study is resumed.

    Raises:
        InputError: the storage cannot be used, or the study exists and is not to be resumed.
        StudyMismatchError: the study to be resumed was made for something else.
        AutotuneError: the storage failed during the search, or the probe raised it.
    """
    clock = Clock(timeout_seconds)
    with opened(storage, listener) as study:
        log = TrialLog(study, problem.choices, memory_limit_bytes)
        limit = effort.trials if trials is None else trials
        told = predictor or NoPredictor()
        session = Session(problem, probe, log, effort, limit, clock, listener, told)
        # A resumed search must not draw again what an earlier one has drawn.
        drawn = len(study.get_trials(deepcopy=False))
        proposer = Proposer(problem, session.judge, study, log, told, seed + drawn)
        session.tell_resumed()
        interrupted = False
        try:
            explore(session, proposer)
            audit(session, proposer)
            settle(session)
        except KeyboardInterrupt:
            interrupted = True
        return _outcome(session, interrupted=interrupted)


def _outcome(session: Session, *, interrupted: bool) -> SearchOutcome:
    records = sorted([*session.log.records, *session.cut_off], key=lambda record: record.number)
    winner = session.leader()
    return SearchOutcome(
        records=tuple(records),
        baseline=session.baseline,
        winner=winner,
        failed_confirmations=tuple(record for record in records if record.failure),
        contributions=contributions(session, winner) if winner else (),
        confirmed=winner is not None and winner.confirmed,
        interrupted=interrupted,
        contradicted=contradicted(records),
    )
