"""The configurations of the GPU comparison: enough of them fit a lent GPU, even if a run stops early."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.core.machine import Machine
from autotune.core.workload import ModelSource, Workload
from autotune.inspection.gpus import find_gpu
from autotune.trainers import trainers
from benchmarks.gpu.cases import CASES, SCENARIOS, Case, Scenario
from benchmarks.gpu.predicted import SCHEDULE
from benchmarks.gpu.prepared import Prepared, prepared
from benchmarks.pictured import SHAPES
from tests.settings import GPU, PACKAGES, pictured_workload, workload

H100 = find_gpu("H100-80GB")
# An image with older packages, in which not everything is installed.
EVERYTHING = {**PACKAGES, "liger-kernel": "0.8.5"}
OLDER = {**PACKAGES, "torch": "2.11.0", "transformers": "5.17.0"}
BARE = {name: version for name, version in OLDER.items() if name != "bitsandbytes"}


def read(scenario: Scenario) -> Workload:
    """Return the workload of a scenario, with one sequence per row for every trainer."""
    if scenario.pixels is not None:
        found = pictured_workload("preference" if scenario.trainer == "dpo" else "messages")
        return replace(found, trainer=scenario.trainer)
    found = workload(lengths=scenario.lengths, layers=SHAPES[scenario.model]["num_hidden_layers"])
    if scenario.teacher is None:
        return replace(found, trainer=scenario.trainer)
    return replace(found, trainer=scenario.trainer, teacher_source=ModelSource("org/teacher"), teacher=found.model)


def all_prepared(packages: dict[str, str]) -> dict[str, Prepared]:
    planned = Machine(replace(GPU.hardware, cores=16), packages, gpu=H100)
    return {scenario.name: prepared(scenario, read(scenario), planned) for scenario in SCENARIOS}


def possible(packages: dict[str, str]) -> list[Case]:
    known = all_prepared(packages)
    return [
        case for case in CASES if known[case.scenario].problem.illegal(known[case.scenario].candidate(case)) is None
    ]


def test_every_case_is_another() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    known = all_prepared(EVERYTHING)
    plans = {
        (case.scenario, known[case.scenario].candidate(case), known[case.scenario].limit_bytes(case)) for case in CASES
    }
    assert len(plans) == len(CASES)


def test_every_case_is_possible_where_all_is_installed() -> None:
    assert possible(EVERYTHING) == list(CASES)


@pytest.mark.parametrize(
    "packages",
    [OLDER, BARE, pytest.param({**BARE, "liger-kernel": "0.8.5"}, marks=pytest.mark.nightly)],
    ids=["older", "bare", "liger"],
)
def test_forty_cases_are_possible_with_older_packages_and_few(packages: dict[str, str]) -> None:
    assert len(possible(packages)) >= 40


def test_wherever_a_run_is_cut_off_its_cases_are_of_all_kinds() -> None:
    # One run of ten minutes probed 59 cases on an H200.
    begun = CASES[:60]
    models = {scenario.name: scenario.model for scenario in SCENARIOS}
    assert {models[case.scenario] for case in begun} == set(SHAPES)
    of = {scenario.name: scenario.trainer for scenario in SCENARIOS}
    assert {of[case.scenario] for case in begun} == set(trainers())
    for knob, choice in {
        "gradient_checkpointing": "off",
        "packing": "bfd",
        "liger": "on",
        "activation_offloading": "on",
        "quantization": "4bit-nf4",
    }.items():
        assert sum(case.choices.get(knob) == choice for case in begun) >= 2
    assert any(case.limit_bytes is not None for case in begun)
    assert {case.choices["per_device_train_batch_size"] for case in begun} >= {1, 2, 4, 8, 16}


def test_a_trace_has_the_plan_and_the_rows_of_the_probe() -> None:
    known = all_prepared(EVERYTHING)
    for case in CASES:
        where = known[case.scenario]
        if where.scenario.trainer != "sft" or where.scenario.pixels is not None:
            continue
        candidate = where.candidate(case)
        rows, lengths = int(candidate["per_device_train_batch_size"]), where.scenario.lengths
        asked = where.trace_request(case)
        assert asked is not None
        if candidate["packing"] == "none":
            longest = sorted((tokens for tokens in lengths for _ in range(lengths[tokens])), reverse=True)
            assert asked.worst == tuple((tokens,) for tokens in longest[:rows])
        else:
            # Full of equal documents, so that there is one way to pack them.
            assert where.scenario.max_length is not None
            assert sum(tokens for (tokens,) in asked.worst) == rows * where.scenario.max_length
            assert len(set(asked.worst)) == len(lengths) == 1
            assert where.scenario.max_length % asked.worst[0][0] == 0
        probed = where.probe_request(case, SCHEDULE)
        assert (probed.plan, probed.model, probed.limit_bytes) == (asked.plan, asked.model, where.limit_bytes(case))
