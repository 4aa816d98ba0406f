"""Two workers that claim one candidate: one of them gets it, even if they read the study at the worst moments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import optuna
import pytest
from optuna.storages import InMemoryStorage
from optuna.trial import TrialState

from autotune.core.candidate import Candidate
from autotune.core.events import ignore
from autotune.study.judge import Judge
from autotune.study.problem import Purpose, Sharing, StudyStorage
from autotune.study.roster import Roster, Worker
from autotune.study.storage import opened
from autotune.study.trial_documents import attributes_after_probe
from autotune.study.trial_log import TrialLog
from tests.study.replayed import BASELINE, LIMIT_BYTES, TableProblem, measurement

PLAN, OTHER_PLAN = "one plan", "another plan"
OTHER = BASELINE.but(batch=2)
# No lease is renewed during a test: what is seen is what the tests do.
SHARING = Sharing(interval_seconds=3600.0, patience_seconds=1.0)


@pytest.fixture
def workers(storage: InMemoryStorage) -> Iterator[tuple[TrialLog, TrialLog]]:
    """Two workers that have read the empty study, and read it again only when they have to."""
    with ExitStack() as stack:
        yield (worker(stack), worker(stack))


def worker(stack: ExitStack) -> TrialLog:
    study = stack.enter_context(opened(StudyStorage("sqlite://", "s", True, {}, SHARING), ignore))
    return TrialLog(study, stack.enter_context(Roster(study, SHARING)), TableProblem(), LIMIT_BYTES)


def claim(log: TrialLog, candidate: Candidate = BASELINE, plan: str = PLAN, most: int = 9) -> int | None:
    return log.claim(candidate, plan, Purpose.SEARCH, None, most)


def states(storage: InMemoryStorage) -> list[TrialState]:
    (study,) = storage.get_all_studies()
    return [trial.state for trial in storage.get_all_trials(study._study_id)]


def test_what_another_worker_probes_is_not_proposed() -> None:
    judge = Judge(TableProblem())
    packed = BASELINE.but(attention="flash", packing="bfd")
    judge.set_running_elsewhere([packed])
    assert not judge.is_open(packed)
    assert not judge.is_open(packed.but(packing="bfd_split"))
    assert judge.is_open(BASELINE)
    judge.set_running_elsewhere([])
    assert judge.is_open(packed)


def test_whoever_claims_a_plan_later_gives_way(storage: InMemoryStorage, workers: tuple[TrialLog, TrialLog]) -> None:
    first, second = workers
    assert claim(first) == 0
    assert claim(second, OTHER) is None
    assert states(storage) == [TrialState.RUNNING, TrialState.FAIL]
    assert second.unfinished == []
    assert claim(second, OTHER, OTHER_PLAN) == 2


def test_a_claim_stands_though_another_is_made_before_it_is_read_again(
    storage: InMemoryStorage, workers: tuple[TrialLog, TrialLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = workers
    read = first.refresh

    def read_late() -> None:
        if len(states(storage)) == 1:
            second._create(OTHER, Purpose.SEARCH, None, PLAN)
        read()

    monkeypatch.setattr(first, "refresh", read_late)
    assert claim(first) == 0
    assert states(storage) == [TrialState.RUNNING, TrialState.RUNNING]


def test_what_another_has_finished_since_is_not_probed_again(workers: tuple[TrialLog, TrialLog]) -> None:
    first, second = workers
    number = claim(first)
    assert number is not None
    first.finish(number, measurement(BASELINE))
    assert claim(second, OTHER) is None
    assert [record.number for record in second.take_new_records()] == [number]


def test_the_last_trials_are_not_exceeded_by_many_who_take_them_at_once(workers: tuple[TrialLog, TrialLog]) -> None:
    first, second = workers
    assert claim(first, most=1) == 0
    assert claim(second, OTHER, OTHER_PLAN, most=1) is None


def test_a_claim_that_was_stored_twice_is_one(
    storage: InMemoryStorage, workers: tuple[TrialLog, TrialLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = workers
    create = storage.create_new_trial

    def twice(study_id: int, template_trial: optuna.trial.FrozenTrial | None = None) -> int:
        create(study_id, template_trial)
        return create(study_id, template_trial)

    monkeypatch.setattr(storage, "create_new_trial", twice)
    assert claim(first) == 0
    assert states(storage) == [TrialState.RUNNING, TrialState.FAIL]
    assert first.unfinished == []
    assert claim(second) is None


def test_a_worker_that_was_taken_for_dead_does_not_store_what_another_measures(
    storage: InMemoryStorage, workers: tuple[TrialLog, TrialLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = workers
    number = claim(first)
    assert number is not None
    monkeypatch.setattr(second._roster, "others", list)
    second.refresh()
    assert [item.candidate for item in second.unfinished] == [BASELINE]
    repeated = claim(second)
    assert repeated is not None
    assert first.finish(number, measurement(BASELINE)) is None
    assert second.finish(repeated, measurement(BASELINE)) is not None
    assert [record.number for record in second.records] == [repeated]
    assert states(storage) == [TrialState.FAIL, TrialState.COMPLETE]


def test_what_a_worker_measures_that_was_taken_for_dead_counts_if_nobody_repeats_it(
    storage: InMemoryStorage, workers: tuple[TrialLog, TrialLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = workers
    number = claim(first)
    assert number is not None
    with monkeypatch.context() as patched:
        patched.setattr(second._roster, "others", list)
        second.refresh()
    kept = first.finish(number, measurement(BASELINE))
    assert kept is not None
    assert (kept.number, kept.candidate, kept.measurement) == (1, BASELINE, measurement(BASELINE))
    assert states(storage) == [TrialState.FAIL, TrialState.COMPLETE]
    assert claim(second) is None
    assert second.records == first.records == [kept]
    assert second.unfinished == []


def test_a_worker_that_joins_and_claims_while_another_reads_the_study_keeps_its_trial(
    storage: InMemoryStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        first = worker(stack)
        read = first._roster.others

        def joins_since() -> list[Worker]:
            found = read()
            assert claim(worker(stack)) == 0
            return found

        monkeypatch.setattr(first._roster, "others", joins_since)
        first.refresh()
        assert states(storage) == [TrialState.RUNNING]
        assert first.unfinished == []


@pytest.mark.parametrize("ended", [False, True])
def test_what_a_worker_stores_that_leaves_while_another_reads_the_study_counts(
    workers: tuple[TrialLog, TrialLog], monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    first, second = workers
    number = claim(second)
    assert number is not None

    def leaves() -> list[Worker]:
        if ended:
            second.finish(number, measurement(BASELINE))
        else:
            # As a kill between the measurement and the end of the trial leaves it.
            for name, figure in attributes_after_probe(measurement(BASELINE)).items():
                second._trial(number).set_user_attr(name, figure)
        return []

    monkeypatch.setattr(first._roster, "others", leaves)
    first.refresh()
    assert [(record.number, record.measurement) for record in first.records] == [(number, measurement(BASELINE))]
    assert (first.running, first.unfinished) == ([], [])
