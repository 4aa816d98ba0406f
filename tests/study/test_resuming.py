"""A study continues after an interruption: no finished probe is lost or repeated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.core.events import Noted, ProbeFinished, ProbeStarted, StudyResumed
from autotune.core.measurement import Measurement
from autotune.core.status import Ending
from autotune.errors import InputError, ProbeServerError, StudyMismatchError
from autotune.reporting.progress import PlainListener
from autotune.study.problem import ProbeRun, SearchOutcome
from autotune.study.storage import check_storage
from tests.study.foretold import Foretold
from tests.study.killed import kill_in_the_middle
from tests.study.replayed import ReplayedTable, measurement
from tests.study.running import FINGERPRINT, PATIENT, Run, probed


class Raising(ReplayedTable):
    """Answers from the table until a given call, and raises there."""

    def __init__(self, at: int, error: BaseException) -> None:
        super().__init__()
        self.at = at
        self.error = error

    def __call__(self, run: ProbeRun, seconds_left: float | None) -> Measurement:
        """Answer a probe, or raise."""
        shown = super().__call__(run, seconds_left)
        if len(self.calls) == self.at:
            raise self.error
        return shown


def assert_nothing_is_probed_twice(run: Run, outcome: SearchOutcome) -> None:
    plans = [run.problem.identity(record.candidate) for record in probed(outcome)]
    assert len(plans) == len(set(plans)) == PATIENT.trials


def test_a_kill_costs_the_running_probe_and_nothing_else(durable: Run, tmp_path: Path) -> None:
    begun = kill_in_the_middle(durable.url, tmp_path / "log", 5)
    killed = int(begun[-1].split()[0])
    table = ReplayedTable()
    outcome = durable(table, resume=True)
    kept = {int(line.split()[0]) for line in begun[:-1]}
    assert kept <= {record.number for record in probed(outcome)}
    assert kept.isdisjoint(number for number, _, schedule in table.calls if schedule == PATIENT.probe)
    assert killed not in {record.number for record in outcome.records}
    assert len(probed(outcome)) == PATIENT.trials
    assert_nothing_is_probed_twice(durable, outcome)


def test_a_kill_during_the_confirmation_repeats_just_that(run: Run, durable: Run, tmp_path: Path) -> None:
    undisturbed = ReplayedTable()
    run(undisturbed)
    schedules = [schedule for _, _, schedule in undisturbed.calls]
    call = 1 + schedules.index(PATIENT.confirmation)
    begun = kill_in_the_middle(durable.url, tmp_path / "log", call)
    assert begun[-1].endswith("confirmation")
    table = ReplayedTable()
    outcome = durable(table, resume=True)
    assert [number for number, _, _ in table.calls] == [number for number, _, _ in undisturbed.calls[call - 1 :]]
    assert outcome.confirmed


def test_the_probe_that_was_killed_is_repeated_first(durable: Run) -> None:
    interrupted = Raising(4, KeyboardInterrupt())
    durable(interrupted)
    table = ReplayedTable()
    durable(table, resume=True)
    assert table.calls[0][1] == interrupted.calls[-1][1]
    assert table.calls[0][0] > interrupted.calls[-1][0]


def test_what_a_resumed_run_was_killed_before_repeating_is_still_repeated(durable: Run) -> None:
    interrupted = Raising(4, KeyboardInterrupt())
    durable(interrupted)
    durable(Raising(1, KeyboardInterrupt()), resume=True)
    table = ReplayedTable()
    durable(table, resume=True)
    assert table.calls[0][1] == interrupted.calls[-1][1]


def test_control_c_returns_what_was_found_so_far(durable: Run) -> None:
    outcome = durable(Raising(5, KeyboardInterrupt()))
    assert outcome.interrupted
    assert not outcome.confirmed
    assert len(probed(outcome)) == 4
    assert outcome.winner is not None
    assert outcome.baseline is not None
    finished = [event.number for event in durable.events if isinstance(event, ProbeFinished)]
    assert finished == [record.number for record in probed(outcome)]
    reasons = {item.reason for item in outcome.contributions if item.number is None}
    assert reasons == {"the search was interrupted", "packing needs flash attention"}


def test_control_c_during_the_first_probe_returns_an_empty_outcome(run: Run) -> None:
    outcome = run(Raising(1, KeyboardInterrupt()))
    assert (outcome.interrupted, outcome.records, outcome.baseline, outcome.winner) == (True, (), None, None)


def test_a_failure_of_the_probes_own_server_is_passed_on_and_loses_nothing(durable: Run) -> None:
    with pytest.raises(ProbeServerError, match="gone"):
        durable(Raising(5, ProbeServerError("gone")))
    outcome = durable(ReplayedTable(), resume=True)
    assert len(probed(outcome)) == PATIENT.trials
    assert_nothing_is_probed_twice(durable, outcome)


def test_a_study_that_ended_for_lack_of_gain_is_returned_without_a_probe_until_its_limits_change(durable: Run) -> None:
    patient = replace(PATIENT, trials=60, patience=4)
    first = durable(ReplayedTable(), effort=patient, predictor=Foretold())
    assert first.ending is Ending.NO_GAIN
    table = ReplayedTable()
    assert durable(table, effort=patient, predictor=Foretold(), resume=True) == first
    assert table.calls == []
    assert durable(table, effort=replace(patient, patience=9), predictor=Foretold(), resume=True).winner is not None
    assert table.calls


def test_a_finished_study_goes_on_with_more_trials(durable: Run) -> None:
    first = durable(ReplayedTable(), trials=5)
    again = durable(ReplayedTable(), resume=True, trials=7)
    kept = again.records[: len(first.records)]
    assert [record.candidate for record in kept] == [record.candidate for record in first.records]
    assert len(probed(again)) == 7


def test_a_study_of_something_else_is_not_resumed(durable: Run) -> None:
    durable(ReplayedTable(), trials=1)
    changed = {**FINGERPRINT, "model": "0123456789abcdef", "dataset": "other", "choices": "new"}
    with pytest.raises(
        StudyMismatchError,
        match=r"another search: different model; dataset: other here, b there; choices: new here, not given there\. "
        r"To resume or join it, restore what differs: options \(.*\), files of the model, the data, the rewards",
    ):
        durable(ReplayedTable(), resume=True, fingerprint=changed)
    with pytest.raises(StudyMismatchError, match="dataset: other here, b there"):
        check_storage(durable.url, "s", resume=True, fingerprint=changed)
    check_storage(durable.url, "s", resume=True, fingerprint=FINGERPRINT)
    check_storage(durable.url, "none", resume=True, fingerprint=changed)


def test_an_existing_study_is_not_continued_unasked(durable: Run) -> None:
    durable(ReplayedTable(), trials=1)
    with pytest.raises(InputError, match=r"already exists.*--resume.*with --storage, another --study"):
        durable(ReplayedTable(), trials=1)


def test_resuming_without_a_study_begins_one_and_says_so(durable: Run) -> None:
    outcome = durable(ReplayedTable(), resume=True, trials=2)
    assert len(probed(outcome)) == 2
    assert any(isinstance(event, Noted) and "a new one begins" in event.text for event in durable.events)


def test_what_was_measured_is_read_back_as_it_was(durable: Run) -> None:
    first = durable(ReplayedTable())
    assert durable(ReplayedTable(), resume=True).records == first.records
    assert all(item.measurement == measurement(item.candidate) for item in probed(first))


def test_a_resumed_search_tells_how_many_probes_it_holds_and_the_best_of_them(durable: Run) -> None:
    first = durable(Raising(5, KeyboardInterrupt()))
    before = len(durable.events)
    durable(ReplayedTable(), resume=True)
    resumed, then = durable.events[before : before + 2]
    assert first.winner is not None
    assert resumed == StudyResumed(
        probes=4,
        vetoed=sum(not record.probed for record in first.records),
        trials_limit=PATIENT.trials,
        best=ProbeFinished(
            first.winner.number, first.winner.candidate, first.winner.purpose, first.winner.measurement, best=True
        ),
    )
    assert isinstance(then, ProbeStarted)
    lines: list[str] = []
    listener = PlainListener(lines.append)
    for event in (resumed, then):
        listener(event)
    assert f"(5 of at most {PATIENT.trials})" in lines[1]


def test_a_new_search_has_nothing_to_tell_of_earlier_ones(run: Run) -> None:
    run(ReplayedTable(), trials=1)
    assert not any(isinstance(event, StudyResumed) for event in run.events)
