"""Rows that TRL splits off for evaluation (``test_split_size``) are in no epoch, and only in evaluations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.app.arguments import ProbeArguments
from autotune.app.options import probe_options
from autotune.app.outcome import RunFacts, result_of
from autotune.app.probe import _sources_with_base
from autotune.core.measurement import Measurement
from autotune.core.status import ProbeStatus
from autotune.errors import InputError
from autotune.study.problem import Purpose, Record, SearchOutcome
from tests.app.bases import a_base
from tests.settings import problem, setting, workload


@pytest.mark.parametrize(("size", "kept"), [(None, 100), (0.25, 75), (40, 60)])
def test_times_and_steps_are_of_the_rows_that_stay(size: object, kept: int) -> None:
    whole = workload()
    here = problem(setting(of=replace(whole, dataset_source=replace(whole.dataset_source, test_size=size))))
    assert here.setting.workload.dataset.documents.rows == 100
    measured = Measurement(ProbeStatus.OK, tokens_per_second=100.0, rows=100, evaluation_seconds=10.0)
    record = Record(0, here.baseline, Purpose.SEARCH, measured, measured)
    found = result_of(
        SearchOutcome((record,), record, record, (), (), confirmed=True, interrupted=False),
        here,
        RunFacts(1000, 0.05, (), 1.0, {}, "/out"),
    ).recommended
    assert found is not None
    assert found.seconds_per_epoch is not None
    assert found.steps_per_epoch == -(-kept // 8)
    assert found.evaluation_seconds == pytest.approx(10.0 if size is None else 10.0 * (100 - kept) / 100)
    trained_tokens = found.token_coverage * whole.dataset.documents.tokens * kept / 100
    assert found.seconds_per_epoch == pytest.approx(trained_tokens / 100.0)


def test_rows_in_place_of_a_base_s_are_split_like_them_and_a_file_has_no_other_rows_to_evaluate_on(
    small_model_directory: Path, small_dataset_file: Path, tmp_path: Path
) -> None:
    base = a_base(tmp_path, "eval_strategy: epoch\ntest_split_size: 0.2\n")
    args = ProbeArguments(small_model_directory, small_dataset_file, base=base.name, trainer="sft")
    found = _sources_with_base(args, probe_options(args), base)
    assert found.evaluation is not None
    assert (found.dataset.test_size, found.evaluation.data_files) == (0.2, str(small_dataset_file))
    whole = a_base(tmp_path, "eval_strategy: epoch\n")
    with pytest.raises(InputError, match=r"small.jsonl is a file, which has no split for it"):
        _sources_with_base(args, probe_options(args), whole)
    found = _sources_with_base(replace(args, dataset=str(tmp_path), dataset_config="en"), probe_options(args), whole)
    assert found.evaluation is not None
    assert (found.dataset.config, found.evaluation.config, found.evaluation.split) == ("en", "en", "test")
