"""From the outcome of a study to its document: promised rates cover all runs, and ratios compare alternating runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.app.outcome import RunFacts, result_of
from autotune.core.candidate import Candidate
from autotune.core.documents.memory_timeline import Mark, MemoryTimeline
from autotune.core.documents.result import LaterFailure, MeasuredCandidate, Result, Smallest
from autotune.core.files.codec import decode, encode
from autotune.core.measurement import Measurement, OutOfMemory
from autotune.core.prediction import Prediction
from autotune.core.program import BACKWARD, MICRO_BATCH
from autotune.core.spread import for_later_run, mean_interval, mean_rate, prediction_interval
from autotune.core.status import Ending, ProbeStatus, RunStatus
from autotune.core.timeline import Occurrence, Part
from autotune.reporting.comparison import headline
from autotune.study.comparison import failed
from autotune.study.problem import Purpose, Record, SearchOutcome, ShortRun
from autotune.units import GIB, MIB
from tests.settings import GPU, machine_with, problem, setting

HERE = setting()
PROBLEM = problem(HERE)
FACTS = RunFacts(1000, 0.05, (), 1.0, {}, "/out")
RAN_OUT = Measurement(ProbeStatus.OUT_OF_MEMORY, "in backward", out_of_memory=OutOfMemory(BACKWARD, 300, 700, 950))


def ran(tokens_per_second: float, peak_bytes: int = 500) -> Measurement:
    return Measurement(ProbeStatus.OK, tokens_per_second=tokens_per_second, peak_bytes=peak_bytes, rows=100)


def record(number: int, shown: Measurement, confirmation: Measurement | None = None, **choices: str | int) -> Record:
    candidate = Candidate({**PROBLEM.baseline, **choices})
    return Record(number, candidate, Purpose.SEARCH, shown, confirmation)


def outcome_of(*records: Record, winner: Record | None = None) -> SearchOutcome:
    return SearchOutcome(
        records=records,
        baseline=records[0] if records else None,
        winner=winner,
        failed_confirmations=failed(records),
        contributions=(),
        confirmed=winner is not None and winner.confirmed,
        interrupted=False,
    )


def result(*records: Record, winner: Record | None = None) -> Result:
    return result_of(outcome_of(*records, winner=winner), PROBLEM, FACTS)


def compared(winner: Record, *runs: tuple[int, float | Measurement]) -> Record:
    """Return a winner with short runs: by trial number, a rate or a measurement."""
    shown = [(number, run if isinstance(run, Measurement) else ran(run)) for number, run in runs]
    return replace(winner, comparison=tuple(ShortRun(number, run) for number, run in shown))


def recommended(found: Result) -> MeasuredCandidate:
    assert found.recommended is not None
    return found.recommended


BASELINE, WINNER = record(0, ran(100)), record(1, ran(900), ran(320), max_length=2000)
SCATTERED = compared(WINNER, (1, 300), (0, 100), (0, 90), (1, 280), (1, 330), (0, 105))


def test_the_speed_up_and_its_interval_come_from_the_pairs() -> None:
    found = result(BASELINE, SCATTERED, winner=SCATTERED)
    ratios = [300 / 100, 280 / 90, 330 / 105]
    expected = mean_interval(ratios)
    assert expected is not None
    assert found.speedup == pytest.approx(mean_rate(ratios))
    assert (found.speedup_low, found.speedup_high) == (expected.low, expected.high)
    assert found.pairs == 3


def test_the_promised_rate_and_its_interval_come_from_the_runs_after_the_probe() -> None:
    found = result(BASELINE, SCATTERED, winner=SCATTERED)
    chosen, rates = recommended(found), [320, 300, 280, 330]
    soon = prediction_interval(rates, [100, 90, 105])
    assert soon is not None
    expected = for_later_run(soon)
    assert chosen.tokens_per_second == found.trials[1].tokens_per_second == pytest.approx(mean_rate(rates))
    assert (chosen.tokens_per_second_low, chosen.tokens_per_second_high) == (
        pytest.approx(expected.low),
        pytest.approx(expected.high),
    )
    assert chosen.runs == 4


def test_the_default_is_promised_what_its_turns_with_the_winner_showed() -> None:
    baseline = result(BASELINE, SCATTERED, winner=SCATTERED).baseline
    assert baseline is not None
    assert baseline.tokens_per_second == pytest.approx(mean_rate([100, 90, 105]))
    assert baseline.runs == 3
    soon = prediction_interval([100, 90, 105], [320, 300, 280, 330])
    assert soon is not None
    assert baseline.tokens_per_second_high == pytest.approx(for_later_run(soon).high)


def test_the_time_in_which_the_device_waits_for_rows_is_a_part_of_a_step() -> None:
    timed = replace(ran(900), step_seconds=2.3, micro_batch_seconds=0.25, update_seconds=0.3, loading_seconds=0.8)
    winner = record(1, timed, per_device_train_batch_size=1)
    found = result(BASELINE, winner, winner=winner)
    assert recommended(found).seconds == {
        "loading rows": 0.8, "micro-batch": pytest.approx(8 * 0.25 - 0.8), "optimizer step": 0.3
    }  # fmt: skip
    assert any("takes 34.8 % of a step" in note for note in found.notes)


def test_one_run_has_no_interval() -> None:
    chosen = recommended(result(BASELINE, WINNER, winner=WINNER))
    assert chosen.tokens_per_second == pytest.approx(320)
    assert chosen.tokens_per_second_low is chosen.tokens_per_second_high is None
    assert chosen.runs == 1


def test_without_pairs_the_speed_up_is_that_of_the_probes() -> None:
    found = result(BASELINE, WINNER, winner=WINNER)
    assert (found.speedup, found.speedup_low, found.pairs) == (9.0, None, 0)


def test_a_comparison_that_time_cut_short_has_the_pairs_that_ran() -> None:
    winner = compared(WINNER, (1, 300), (0, 100), (0, 90))
    found = result(BASELINE, winner, winner=winner)
    assert (found.speedup, found.speedup_low, found.pairs) == (pytest.approx(3.0), None, 1)


@pytest.mark.parametrize(
    ("rates", "text"),
    [
        ((80, 400), "As fast as TRL's default"),
        ((299, 301), "3.00x the speed of"),
        ((), "3.00x the speed of"),
    ],
)
def test_one_pair_shows_nothing_where_further_runs_may_be_as_slow_as_the_default(
    rates: tuple[float, ...], text: str
) -> None:
    winner = compared(
        record(1, ran(300), max_length=2000), (1, 300), (0, 100), (0, RAN_OUT), *((1, rate) for rate in rates)
    )
    found = result(BASELINE, winner, winner=winner)
    assert found.pairs == 1
    assert headline(found, recommended(found)).startswith(text)


def test_a_default_that_is_recommended_is_as_fast_as_itself() -> None:
    baseline = compared(record(0, ran(100), ran(80)), (0, 90), (0, 85))
    found = result(baseline, winner=baseline)
    assert (found.speedup, found.speedup_low, found.pairs) == (1.0, None, 0)
    assert recommended(found).runs == 3


def test_a_default_that_fails_in_a_short_run_is_told_of() -> None:
    winner = compared(WINNER, (1, 300), (0, 100), (0, RAN_OUT), (1, 310))
    found = result(BASELINE, winner, winner=winner)
    assert found.notes == ("TRL's default ran in its probe, and ran out of memory in a later run (in backward).",)
    assert found.speedup == pytest.approx(3.0)


def test_a_candidate_that_fails_after_its_probe_is_told_of() -> None:
    told = "ran in its probe, and ran out of memory in a later run"
    assert f"TRL's default {told}" in result(record(0, ran(100), RAN_OUT)).notes[0]
    failing = compared(WINNER, (1, 300), (0, 100), (0, 90), (1, RAN_OUT))
    assert f"Probe 1 {told}" in result(BASELINE, failing).notes[0]


def test_a_default_that_failed_beside_a_winner_that_failed_too_is_told_of_with_all_its_runs() -> None:
    failing = compared(WINNER, (1, 300), (0, ran(100, peak_bytes=700)), (0, RAN_OUT), (1, RAN_OUT))
    other = record(2, ran(200), ran(200), liger="on")
    found = result(BASELINE, failing, other, winner=other)
    told = "ran in its probe, and ran out of memory in a later run (in backward)."
    assert found.notes[:2] == (f"TRL's default {told}", f"Probe 1 {told}")
    assert found.baseline is not None
    assert found.baseline.peak_bytes == 700


def test_of_candidates_within_the_spread_between_runs_the_lightest_is_named() -> None:
    near = [record(2, ran(310, 400 * MIB), liger="on"), record(3, ran(290, 300 * MIB), liger="on", max_length=64)]
    far = [record(4, ran(200)), record(5, ran(301), RAN_OUT), record(6, RAN_OUT)]
    heavy = replace(SCATTERED, measurement=ran(900, 500 * MIB))
    (note, *_) = result(BASELINE, heavy, *near, *far, winner=heavy).notes[1:]
    assert note == (
        "Of the candidates as fast within run-to-run variation, probe 3 (liger=on max_length=64) needs the least "
        "memory: 300 MiB instead of 500 MiB."
    )


@pytest.mark.parametrize("need_bytes", [600, 490])
def test_a_candidate_within_the_spread_that_hardly_needs_less_memory_is_counted_without_a_note(need_bytes: int) -> None:
    winner = replace(SCATTERED, measurement=ran(900, 500))
    found = result(BASELINE, winner, record(2, ran(310, need_bytes)), winner=winner)
    assert "; 1 other is as fast within run-to-run variation; " in found.compared
    assert found.notes == ()


def test_there_is_no_speed_up_over_a_baseline_that_did_not_run() -> None:
    winner = record(1, ran(300), ran(200), max_length=2000)
    assert result(record(0, RAN_OUT), winner, winner=winner).speedup is None


def test_the_peak_that_is_promised_is_the_highest_of_all_runs() -> None:
    winner = record(1, ran(300, peak_bytes=500), ran(200, peak_bytes=450), max_length=2000)
    winner = compared(winner, (1, ran(200, peak_bytes=510)), (0, ran(100, peak_bytes=700)))
    found = result(BASELINE, winner, winner=winner)
    assert recommended(found).peak_bytes == 510
    assert found.baseline is not None
    assert found.baseline.peak_bytes == 700


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


def test_the_smallest_need_on_a_gpu_is_what_was_reserved_as_wherever_a_need_is_shown() -> None:
    needs = replace(ran(100, peak_bytes=500), reserved_bytes=800)
    assert result(record(1, needs, max_length=2000)).smallest_peak_bytes == 800


@pytest.mark.parametrize(("free_bytes", "told"), [(199, True), (200, False)])
def test_a_context_of_trls_own_command_that_may_not_fit_beside_the_winner_is_told_of(
    free_bytes: int, told: bool
) -> None:
    shown = replace(ran(320), reserved_bytes=800, device_bytes=1000)
    card = machine_with(GPU, memory_bytes=1000 + free_bytes, used_by_others_bytes=0)
    winner = record(1, shown, shown)
    found = result_of(outcome_of(winner, winner=winner), problem(setting(machine=card)), FACTS)
    assert any("`trl sft` holds a second CUDA context" in note for note in found.notes) == told


def test_a_default_that_fits_and_keeps_too_few_tokens_is_no_peak_of_what_does_not_fit() -> None:
    found = result(record(0, ran(100, peak_bytes=500)), record(1, RAN_OUT, max_length=2000))
    assert found.status is RunStatus.NOTHING_FITS
    assert found.smallest_peak_bytes == 1000
    assert "max_length=1024 keeps 91.5 % of the dataset's tokens" in found.trials[0].illegal
    assert found.trials[1].illegal == ""


def test_a_candidate_that_ran_out_in_a_later_run_needs_what_that_run_asked_for() -> None:
    assert result(record(1, ran(300, peak_bytes=500), RAN_OUT, max_length=2000)).smallest_peak_bytes == 1000


def test_what_was_predicted_stands_beside_what_was_measured() -> None:
    trial = result(replace(record(0, ran(100)), prediction=Prediction(450, 0.1, 120.0))).trials[0]
    assert (trial.predicted_bytes, trial.predicted_tokens_per_second) == (450, 120.0)
    assert result(record(0, ran(100))).trials[0].predicted_bytes is None


def test_a_prediction_that_a_probe_contradicts_is_told_as_a_bug() -> None:
    fitted = (replace(record(3, ran(100, 300 * MIB)), prediction=Prediction(size, 0.1)) for size in (2 * GIB, 1050))
    wrong, within = (result_of(outcome_of(each), PROBLEM, FACTS).notes for each in fitted)
    assert len(wrong) == len(within) + 1
    assert wrong[0].startswith("Probe 3 was predicted to need 2.00 GiB, ±10.0 %, but ran with 300 MiB. Please report")


def test_the_traced_memory_of_a_step_stands_beside_what_was_measured_and_is_read_again() -> None:
    mark = Mark(Part(MICRO_BATCH, Occurrence.FIRST), False, 0)
    traced = MemoryTimeline((mark,), {"parameter": (5, 7)}, 1, {"parameter": 7}, 0.1, True, 1)
    facts = replace(FACTS, timelines={BASELINE.candidate: traced})
    found = result_of(outcome_of(BASELINE, WINNER, winner=WINNER), PROBLEM, facts)
    assert recommended(found).timeline is None
    assert found.baseline is not None
    assert found.baseline.timeline == traced
    document = encode(found.written)
    assert decode(Result, document).with_moments(found.timelines).baseline == found.baseline
    del document["baseline"]["timeline"]
    assert decode(Result, document).baseline == replace(found.baseline, timeline=None)


@pytest.mark.parametrize(
    ("ending", "others", "said"),
    [
        (Ending.TIME, 0, "the only compared candidate out of {size}; the time limit ended the search"),
        (Ending.TRIALS, 2, "the fastest of 3 compared candidates out of {size}; the limit of probes ended the search"),
        *(
            (ending, 1, f"the fastest of 2 compared candidates out of {{size}}; {ending} ended the search")
            for ending in (Ending.PATIENCE, Ending.NO_GAIN, Ending.SAMPLED)
        ),
        (Ending.EXHAUSTED, 1, ""),
        (None, 1, "the fastest of 2 compared candidates out of {size}; an interruption ended the search"),
    ],
)
def test_of_how_many_it_is_the_fastest_and_what_ended_the_search_is_said(
    ending: Ending | None, others: int, said: str
) -> None:
    barred, winner = record(0, ran(100), max_length=64), record(1, ran(90), max_length=2000)
    probed = [record(number, RAN_OUT, max_length=2000 + number) for number in range(2, 2 + others)]
    undecided = [
        record(8, Measurement(status), max_length=3000)
        for status in (ProbeStatus.TIMEOUT, ProbeStatus.VETOED, ProbeStatus.CRASHED, ProbeStatus.UNSUPPORTED)
    ]
    found = outcome_of(barred, winner, *probed, *undecided, winner=winner)
    shown = result_of(replace(found, ending=ending), PROBLEM, FACTS)
    assert PROBLEM.size > 3
    assert shown.compared == said.format(size=f"{PROBLEM.size:,}")
    assert (shown.candidates, shown.ended) == (PROBLEM.size, ending)


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        (
            Ending.TRIALS,
            (
                "the fastest of 4 compared candidates out of {size}; 2 others are as fast within run-to-run variation; "
                "the limit of probes ended the search"
            ),
        ),
        (
            None,
            (
                "the fastest of 4 compared candidates out of {size}; 2 others are as fast within run-to-run variation; "
                "an interruption ended the search"
            ),
        ),
        (Ending.EXHAUSTED, "the fastest of all candidates; 2 others are as fast within run-to-run variation"),
    ],
)
def test_it_is_not_called_the_fastest_where_others_may_be_as_fast(ending: Ending | None, said: str) -> None:
    winner = compared(record(1, ran(300), max_length=2000), (1, 290), (0, 100), (1, 300), (0, 100))
    alike = [record(2, ran(295), max_length=2001), record(3, ran(400), max_length=2002)]
    slower = record(4, ran(150), max_length=2003)
    default = replace(BASELINE, measurement=ran(500))
    found = outcome_of(default, winner, *alike, slower, winner=winner)
    shown = result_of(replace(found, ending=ending), PROBLEM, FACTS)
    assert shown.compared == said.format(size=f"{PROBLEM.size:,}")


def test_a_run_that_failed_after_its_probe_is_kept_with_its_trial() -> None:
    longer = result(record(0, ran(100), RAN_OUT)).trials[0].later_failure
    assert longer == LaterFailure(longer=True, status=ProbeStatus.OUT_OF_MEMORY, reason="in backward")
    shorter = result(BASELINE, compared(WINNER, (1, 300), (0, RAN_OUT))).trials[0].later_failure
    assert shorter == replace(longer, longer=False)
    assert result(BASELINE, WINNER).trials[1].later_failure is None


def test_the_smallest_predicted_need_is_handed_over_with_its_trial() -> None:
    failed_probe = record(0, RAN_OUT)
    found = replace(outcome_of(failed_probe), smallest=Smallest(WINNER.candidate, 800, failed_probe.number))
    assert result_of(found, PROBLEM, FACTS).smallest == Smallest(WINNER.candidate, 800, 0)
    untried = replace(found, smallest=Smallest(WINNER.candidate, 800, None))
    document = result_of(untried, PROBLEM, FACTS)
    assert document.smallest == Smallest(WINNER.candidate, 800, None)
    assert decode(Result, encode(document)) == document
