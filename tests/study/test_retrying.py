"""Calls of a storage that fails for a while are repeated; a permanent failure is reported."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import InMemoryStorage
from sqlalchemy.exc import OperationalError, PendingRollbackError

from autotune.core.events import Noted
from autotune.core.measurement import Measurement
from autotune.errors import AutotuneError
from autotune.study.problem import ProbeRun, Sharing
from autotune.study.retrying import is_transient
from tests.study.replayed import TableProblem, measurement
from tests.study.running import PATIENT, Run, probed

# A call is repeated once, and a lease never lapses, however slow the machine is.
SHARING = Sharing(interval_seconds=3600.0, patience_seconds=0.0)


class Failing:
    """Makes a method of a storage fail some times, before or after it has done its work."""

    def __init__(self, method: Callable[..., Any], error: Exception, times: int, *, after: bool) -> None:
        self.method, self.error, self.left, self.after = method, error, times, after

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Fail, or work."""
        if not self.left:
            return self.method(*arguments, **named)
        self.left -= 1
        if self.after:
            self.method(*arguments, **named)
        raise self.error


def lost_connection() -> Exception:
    return OperationalError("COMMIT", {}, Exception("server closed the connection unexpectedly"))


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    "method", ["create_new_trial", "set_trial_user_attr", "set_trial_state_values", "set_study_user_attr"]
)
def test_a_call_whose_connection_is_lost_is_repeated_whether_it_was_done_or_not(
    storage: InMemoryStorage, monkeypatch: pytest.MonkeyPatch, method: str, after: bool
) -> None:
    failing = Failing(getattr(storage, method), lost_connection(), 0, after=after)
    monkeypatch.setattr(storage, method, failing)
    # Not a moment passes between the attempts.
    monkeypatch.setattr("autotune.study.retrying.random.uniform", lambda *_: 0.0)

    def probe(run: ProbeRun, seconds_left: float | None) -> Measurement:
        failing.left = 1
        return measurement(run.candidate)

    search = Run("sqlite://", sharing=SHARING)
    outcome = search(probe)
    plans = [TableProblem().identity(record.candidate) for record in probed(outcome)]
    assert len(plans) == len(set(plans)) == PATIENT.trials
    assert outcome.confirmed
    assert any(isinstance(event, Noted) and "does not answer" in event.text for event in search.events)
    (study,) = storage.get_all_studies()
    states = {trial.state for trial in storage.get_all_trials(study._study_id)}
    assert optuna.trial.TrialState.RUNNING not in states


def test_a_storage_that_does_not_come_back_is_told_and_named(
    storage: InMemoryStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def probe(run: ProbeRun, seconds_left: float | None) -> Measurement:
        if run.number == 3:
            failing = Failing(storage.set_trial_user_attr, lost_connection(), 10_000, after=False)
            monkeypatch.setattr(storage, "set_trial_user_attr", failing)
        return measurement(run.candidate)

    with pytest.raises(AutotuneError, match=r"sqlite:// cannot be used: .*server closed the connection.*--resume"):
        Run("sqlite://", sharing=SHARING)(probe)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (lost_connection(), True),
        (OSError(errno.ESTALE, "Stale file handle"), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (RuntimeError("Error: did not possess lock"), True),
        (ValueError("Invalid log format."), False),
        (PendingRollbackError("Can't reconnect until invalid transaction is rolled back."), True),
    ],
)
def test_what_a_restart_ends_passes_and_what_the_user_has_to_change_does_not(error: Exception, expected: bool) -> None:
    assert is_transient(error) is expected


def test_a_trial_that_was_stored_before_its_worker_was_killed_counts(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'study.db'}"

    def killed(run: ProbeRun, seconds_left: float | None) -> Measurement:
        if run.number == 4:
            raise KeyboardInterrupt
        return measurement(run.candidate)

    first = Run(url, sharing=SHARING)(killed)
    study = optuna.load_study(storage=url, study_name="s")
    storage = study._storage
    # As a kill between the measurement and the end of the trial leaves it.
    template = study.get_trials()[max(record.number for record in probed(first))]
    template.state = optuna.trial.TrialState.RUNNING
    template.system_attrs = {key: value for key, value in template.system_attrs.items() if "constraint" not in key}
    template.values = None
    template.datetime_complete = None
    study.add_trial(template)
    before = len(storage.get_all_trials(study._study_id))
    again = Run(url, sharing=SHARING)(killed, resume=True, trials=1)
    assert again.records[-1].number == before - 1
    assert again.records[-1].measurement == measurement(again.records[-1].candidate)
