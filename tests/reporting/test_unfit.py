"""Sentences on a search that ended without a recommendation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.core.documents.result import LaterFailure
from autotune.core.machine import DeviceKind
from autotune.core.status import Ending, ProbeStatus, RunStatus
from autotune.reporting.outlook import nothing_fits_text
from autotune.units import GIB
from tests.reporting.examples import BASELINE, a_trial, nothing_fits, only_the_default_fits

SMALL = BASELINE.but(per_device_train_batch_size=1)


def test_nothing_fits_names_budget_and_smallest_peak() -> None:
    assert (
        nothing_fits_text(nothing_fits())
        == "Nothing fits in 4.00 GiB less the margin of 5 %: the smallest measured need was 6.00 GiB."
    )


def test_nothing_fits_invents_no_peak() -> None:
    assert "no need was measured" in nothing_fits_text(replace(nothing_fits(), smallest_peak_bytes=None))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("cuda", "memory ran out at 3.80 GiB."),
        (
            "cpu",
            "memory ran out at 3.80 GiB, which also counts unwritten memory; the smallest resident peak was 2.00 GiB.",
        ),
    ],
)
def test_a_peak_that_would_fit_is_not_given_as_what_does_not(kind: DeviceKind, said: str) -> None:
    result = nothing_fits()
    result = replace(result, hardware=replace(result.hardware, kind=kind), smallest_peak_bytes=2 * GIB)
    assert nothing_fits_text(result) == f"Nothing fits in 4.00 GiB less the margin of 5 %: {said}"


def test_a_default_that_fits_and_may_not_be_recommended_is_told_apart_from_what_does_not_fit() -> None:
    assert nothing_fits_text(only_the_default_fits()) == (
        "Nothing that may be recommended fits in 24.00 GiB less the margin of 5 %: the smallest measured need was "
        "30.00 GiB. TRL's default fits with 13.00 GiB, but may not be recommended: max_length=1024 keeps 24.3 % of the "
        "dataset's tokens, and 99.0 % of the tokens were requested."
    )


def test_a_default_that_alone_ran_is_no_proof_that_nothing_fits() -> None:
    result = replace(only_the_default_fits(), status=RunStatus.FAILED)
    said = nothing_fits_text(replace(result, trials=(result.trials[0], result.trials[3])))
    assert said.startswith("No candidate can be recommended. TRL's default fits with 13.00 GiB, but may not")


def test_what_fit_its_probe_and_lacked_memory_in_its_longer_run_does_not_fit() -> None:
    later = LaterFailure(longer=True, status=ProbeStatus.OUT_OF_MEMORY, reason="in backward")
    trial = a_trial(1, SMALL, peak_bytes=3 * GIB, reserved_bytes=int(3.6 * GIB), later_failure=later)
    result = replace(nothing_fits(), trials=(nothing_fits().trials[0], trial))
    expected = "Nothing fits in 4.00 GiB less the margin of 5 %: the smallest measured need was 6.00 GiB."
    assert nothing_fits_text(result) == expected


@pytest.mark.parametrize(
    ("status", "ended"),
    [
        (ProbeStatus.CRASHED, "crashed"),
        (ProbeStatus.UNSUPPORTED, "could not run"),
        (ProbeStatus.TIMEOUT, "exceeded its time limit"),
    ],
)
def test_a_candidate_that_ended_without_lacking_memory_is_no_proof(status: ProbeStatus, ended: str) -> None:
    trial = a_trial(2, SMALL, status=status, reason="ImportError: no module named kernel")
    result = replace(nothing_fits(), trials=(*nothing_fits().trials, trial), ended=Ending.EXHAUSTED)
    assert nothing_fits_text(result) == (
        "Nothing that was tried fits in 4.00 GiB less the margin of 5 %: the smallest measured need was 6.00 GiB; "
        f"probe 2 {ended}: ImportError: no module named kernel."
    )


def test_what_a_limit_left_untried_without_predictions_is_not_said_to_not_fit() -> None:
    assert nothing_fits_text(replace(nothing_fits(), ended=Ending.TIME)).startswith("Nothing that was tried fits in")
    assert nothing_fits_text(replace(nothing_fits(), ended=Ending.SAMPLED)).startswith("Nothing that was tried fits in")
    assert nothing_fits_text(replace(nothing_fits(), ended=Ending.EXHAUSTED)).startswith("Nothing fits in")


@pytest.mark.parametrize("reason", ["signal 9", "signal 9."])
def test_a_candidate_that_crashed_is_told_with_its_reason(reason: str) -> None:
    crashed = a_trial(1, SMALL, status=ProbeStatus.CRASHED, reason=reason)
    said = nothing_fits_text(replace(nothing_fits(), status=RunStatus.FAILED, trials=(crashed,)))
    assert said == "No candidate can be recommended; probe 1 crashed: signal 9."
