"""From what a study found to the document: promises cover both runs, and ratios compare like with like."""

from __future__ import annotations

from dataclasses import replace

from autotune.api.outcome import RunFacts, result_of
from autotune.core.candidate import Candidate
from autotune.core.measurement import Measurement, OutOfMemory
from autotune.core.result import Result
from autotune.core.status import Phase, ProbeStatus, RunStatus
from autotune.space import Wishes, default_file, load, resolve
from autotune.study.prediction import Prediction
from autotune.study.problem import Purpose, Record, SearchOutcome
from autotune.trainers import TRAINERS
from autotune.trainers.problem import TrainerProblem
from autotune.units import GIB, MIB
from tests.settings import setting

SFT, WISHES, HERE = TRAINERS["sft"], Wishes({}), setting()
PROBLEM = TrainerProblem(SFT, resolve(load(default_file("sft"), "sft"), SFT.techniques, HERE, WISHES), HERE, WISHES)
FACTS = RunFacts(1000, 0.05, (), 1.0, {}, "/out")
RAN_OUT = Measurement(
    ProbeStatus.OUT_OF_MEMORY, "in backward", out_of_memory=OutOfMemory(Phase.BACKWARD, 300, 700, 950)
)


def ran(tokens_per_second: float, peak_bytes: int = 500) -> Measurement:
    return Measurement(ProbeStatus.OK, tokens_per_second=tokens_per_second, peak_bytes=peak_bytes, rows=100)


def record(number: int, shown: Measurement, confirmation: Measurement | None = None, **choices: str | int) -> Record:
    candidate = Candidate({**PROBLEM.baseline, **choices})
    return Record(number, candidate, Purpose.SEARCH, shown, confirmation)


def outcome_of(*records: Record, winner: Record | None = None, interrupted: bool = False) -> SearchOutcome:
    return SearchOutcome(
        records=records,
        baseline=records[0] if records else None,
        winner=winner,
        failed_confirmations=tuple(item for item in records if item.confirmation and not item.confirmation.ok),
        contributions=(),
        confirmed=winner is not None and winner.confirmed,
        interrupted=interrupted,
    )


def result(*records: Record, winner: Record | None = None, interrupted: bool = False) -> Result:
    return result_of(outcome_of(*records, winner=winner, interrupted=interrupted), PROBLEM, FACTS)


def test_of_two_speed_ups_the_one_that_promises_less_is_told() -> None:
    baseline, winner = record(0, ran(100), ran(80)), record(1, ran(300), ran(200), max_length=2000)
    assert result(baseline, winner, winner=winner).speedup == 2.5


def test_a_default_that_fails_in_its_longer_run_is_told_of() -> None:
    found = result(record(0, ran(100), RAN_OUT))
    assert "TRL's default ran in its probe and not in its longer run (out_of_memory, in backward)" in found.notes[0]


def test_a_machine_whose_speed_is_not_steady_is_told_of() -> None:
    baseline, winner = record(0, ran(100), ran(10)), record(1, ran(300), ran(290), max_length=2000)
    found = result(baseline, winner, winner=winner)
    assert found.speedup == 3.0
    assert "not steady: TRL's default trained at 100 tok/s" in found.notes[0]
    assert result(winner, winner=winner).notes == ()


def test_the_speed_up_never_compares_a_probe_with_a_longer_run() -> None:
    baseline, winner = record(0, ran(100)), record(1, ran(300), ran(200), max_length=2000)
    assert result(baseline, winner, winner=winner).speedup == 3.0


def test_there_is_no_speed_up_over_a_baseline_that_did_not_run() -> None:
    winner = record(1, ran(300), ran(200), max_length=2000)
    assert result(record(0, RAN_OUT), winner, winner=winner).speedup is None


def test_the_peak_that_is_promised_is_the_highest_of_both_runs() -> None:
    winner = record(0, ran(300, peak_bytes=500), ran(200, peak_bytes=450), max_length=2000)
    chosen = result(winner, winner=winner).recommended
    assert chosen is not None
    assert chosen.peak_bytes == 500
    assert chosen.tokens_per_second == 200


def test_an_epoch_is_as_long_as_the_kept_tokens_take() -> None:
    winner = record(0, ran(115), ran(115), max_length=2000)
    chosen = result(winner, winner=winner).recommended
    assert chosen is not None
    assert chosen.seconds_per_epoch == HERE.workload.dataset.lengths.tokens / 115
    assert chosen.steps_per_epoch == 13


def test_what_was_held_and_asked_for_is_the_smallest_need_when_all_ran_out() -> None:
    found = result(record(0, RAN_OUT))
    assert found.status is RunStatus.NOTHING_FITS
    assert found.smallest_peak_bytes == 1000


def test_a_time_limit_before_anything_was_decided_is_no_proof_that_nothing_fits() -> None:
    cut_off = record(0, replace(RAN_OUT, status=ProbeStatus.TIMEOUT, out_of_memory=None))
    assert result(cut_off).status is RunStatus.INTERRUPTED


def test_what_was_predicted_stands_beside_what_was_measured() -> None:
    trial = result(replace(record(0, ran(100)), prediction=Prediction(450, 0.1, True, 120.0))).trials[0]
    assert (trial.predicted_bytes, trial.predicted_tokens_per_second) == (450, 120.0)
    assert result(record(0, ran(100))).trials[0].predicted_bytes is None


def test_a_prediction_that_a_probe_contradicts_is_told_as_a_bug() -> None:
    audited = replace(record(3, ran(100, 300 * MIB)), prediction=Prediction(2 * GIB, 0.1, True))
    found = result_of(replace(outcome_of(audited), contradicted=(audited,)), PROBLEM, FACTS)
    (note,) = found.notes
    assert note.startswith("Trial 3 was predicted to need 2.00 GiB, within 10.0 %, and ran with 300 MiB: a bug")
