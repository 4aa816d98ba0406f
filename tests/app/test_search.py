"""The request of each run of a search: its batches and its time limit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.app.arguments import ProbeArguments
from autotune.app.output import Output
from autotune.app.search import Run, check_study, fingerprint, seed_of, storage_of, study_of, timeout_of
from autotune.core.candidate import Candidate
from autotune.core.effort import EFFORTS
from autotune.core.measurement import Schedule
from autotune.errors import StudyMismatchError
from autotune.planning.tracing.cache import package_digest
from autotune.probing import JobServer
from autotune.study.problem import ComparisonTurn, ProbeRun, Purpose
from autotune.study.storage import begin
from autotune.units import GIB
from tests.settings import GPU, problem, setting


def test_pairs_draw_other_batches_than_probes_and_than_each_other() -> None:
    def seed(number: int, pair: int | None) -> int:
        turn = None if pair is None else ComparisonTurn(7, number, pair)
        return seed_of(ProbeRun(number, Candidate({}), Purpose.SEARCH, Schedule(), turn), 42)

    assert (seed(7, None), seed(7, 0), seed(7, 1)) == (42, 43, 44)
    assert seed(7, 1) == seed(0, 1)


@pytest.mark.parametrize(
    ("expected_seconds", "seconds_left", "timeout_seconds"),
    # Four whole steps of 512 documents at 250 ms each take longer than a probe of `--effort quick` may.
    [(0.0, None, 300.0), (0.0, 20.0, 20.0), (512.0, None, 1536.0), (512.0, 700.0, 700.0)],
)
def test_a_run_of_long_whole_steps_may_take_longer_than_a_probe(
    expected_seconds: float, seconds_left: float | None, timeout_seconds: float
) -> None:
    run = ProbeRun(7, Candidate({}), Purpose.CONFIRMATION, Schedule(), expected_seconds=expected_seconds)
    assert timeout_of(run, EFFORTS["quick"], seconds_left) == timeout_seconds


def test_a_folder_that_is_renamed_keeps_its_study_and_one_in_a_storage_is_named_by_its_folder(tmp_path: Path) -> None:
    asked = ProbeArguments(model="m", dataset="d")
    first, second = Output(tmp_path / "first"), Output(tmp_path / "second")
    assert study_of(asked, first)[1] == study_of(asked, second)[1]
    shared = replace(asked, storage="journal:///shared.log")
    assert study_of(shared, first) == ("journal:///shared.log", "first")
    assert study_of(replace(shared, study="s"), first) == ("journal:///shared.log", "s")


def test_a_study_of_other_batches_is_not_resumed() -> None:
    of_one, of_two = (fingerprint(problem(setting(machine=GPU)), 80 * GIB, seed) for seed in (1, 2))
    assert of_one != of_two


def test_a_study_of_another_budget_is_refused_before_anything_is_traced(tmp_path: Path, job_server: JobServer) -> None:
    asked, out = ProbeArguments(model="m", dataset="d", resume=True), Output(tmp_path)
    run = Run(asked, problem(setting(machine=GPU)), job_server, out, 80 * GIB)
    check_study(asked, out, storage_of(run).fingerprint)
    begin(storage_of(run), lambda _: None)
    check_study(asked, out, storage_of(run).fingerprint)
    with pytest.raises(StudyMismatchError, match=r"memory limit: 40\.00 GiB .* here, 80\.00 GiB .* there"):
        check_study(asked, out, storage_of(replace(run, limit_bytes=40 * GIB)).fingerprint)


def test_what_a_study_depends_on_is_kept_in_words_that_say_what_differs() -> None:
    here = fingerprint(problem(setting(machine=GPU)), 80 * GIB, seed=1)
    assert here["device"] == "a GPU made by hand (cuda)"
    assert here["memory limit"] == "80.00 GiB (85,899,345,920 bytes, the budget less its margin)"
    assert here["version of trl"] == "1.16.0"
    assert here["version of driver"] == "580.1"
    assert here["source of autotune"] == package_digest()
    other = replace(GPU, hardware=replace(GPU.hardware, name="another"), packages={**GPU.packages, "trl": "1.17.0"})
    there = fingerprint(problem(setting(machine=other)), 80 * GIB, seed=1)
    assert {part for part in here if here[part] != there[part]} == {"device", "version of trl"}
