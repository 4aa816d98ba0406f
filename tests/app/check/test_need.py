"""The traced need of a configuration: its speed, and the margin below which all layers are traced."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.app.check.need import judge_by_study, judge_by_traces
from autotune.app.planned import planned_machine
from autotune.core.configuration import Configuration
from autotune.core.documents.estimate import MemoryEstimate
from autotune.core.documents.verdict import Need, Outcome, Source, Verdict
from autotune.core.plan import TrainingPlan
from autotune.core.program import EVALUATE, MICRO_BATCH, OPTIMIZER_STEP
from autotune.core.workload import Workload
from autotune.emit.document import json_text
from autotune.inspection.machine import environment
from autotune.planning.single import PlanTracer, SizedPlan
from autotune.planning.tracing.cache import Cache
from autotune.planning.tracing.store import Traces
from autotune.reporting.check import verdict_report
from autotune.trainers.evaluation import whole_geometry
from autotune.units import GIB
from tests.app.check.conftest import Checked, Write
from tests.app.configured import sft
from tests.planning.stand_in import AnalyticTracer
from tests.reporting.examples import a_result
from tests.settings import problem, setting, workload
from tests.small import write_rows


def need_of(lengths: dict[int, int], folder: Path, budget_bytes: int) -> Need:
    machine = planned_machine("H100-80GB")
    here = problem(setting(machine=machine, of=workload(lengths=lengths)), {"packing": "none"})
    plan = here.trainer.plan(here.baseline, here.setting)
    tracer = PlanTracer(Traces(AnalyticTracer(), Cache(folder), "model", {}), here.setting, machine.gpu)
    sized = SizedPlan(plan, whole_geometry(here.trainer, plan, here.setting.workload))
    need = judge_by_traces(tracer, sized, machine, budget_bytes).need
    assert need is not None
    return need


@pytest.mark.parametrize(("lengths", "known"), [({64: 16}, True), ({64: 8, 8: 8}, False)])
def test_the_speed_is_known_where_the_largest_micro_batches_stand_for_all(
    lengths: dict[int, int], known: bool, tmp_path: Path
) -> None:
    need = need_of(lengths, tmp_path, 80 * GIB)
    assert need.memory is not None
    assert need.memory.step_seconds
    assert (need.tokens_per_second is not None) is known


def test_a_need_that_is_not_traced_whole_is_said_to_be_from_few_layers(tmp_path: Path) -> None:
    far = need_of({64: 16}, tmp_path, 80 * GIB)
    near = need_of({64: 16}, tmp_path, round(1.2 * far.bytes))

    def evidence(need: Need) -> str:
        verdict = Verdict(Outcome.FITS, "", "", budget_bytes=0, need=need)
        found = verdict_report(verdict).verdict
        assert found is not None
        return " ".join(found.evidence)

    assert far.source is near.source is Source.TRACED
    assert "few layers" in evidence(far)
    assert "few layers" not in evidence(near)


def write_study(folder: Path, rows: Workload, recommended: TrainingPlan) -> None:
    """Write the result of a study on an H100 that recommends a plan."""
    machine = planned_machine("H100-80GB")
    found = a_result(workload=rows, hardware=machine.hardware, environment=environment(machine))
    assert found.recommended is not None
    found = replace(found, recommended=replace(found.recommended, plan=recommended))
    (folder / "result.json").write_text(json_text(found), encoding="utf-8")


@pytest.mark.parametrize(
    ("length", "packing", "measured"),
    [(None, False, True), (4096, False, True), (1024, False, False), (4096, True, False)],
)
def test_the_file_of_a_base_that_keeps_a_length_that_cuts_no_row_is_the_measured_one(
    length: int | None, packing: bool, measured: bool, tmp_path: Path
) -> None:
    machine, rows = planned_machine("H100-80GB"), workload()
    here = problem(setting(machine=machine, of=rows))
    plan = here.trainer.plan(here.normal(here.baseline.but(max_length=rows.longest)), here.setting)
    assert plan.args["max_length"] == 2000
    known = replace(plan, args={**plan.args, "packing": packing})
    write_study(tmp_path, rows, known)
    written = replace(known, args={**known.args, "max_length": length})
    config = Configuration("SFTConfig", written.args, written.args)
    sized = SizedPlan(written, whole_geometry(here.trainer, plan, here.setting.workload))
    assert (judge_by_study(config, sized, tmp_path, rows, machine, 80 * GIB) is not None) is measured


@pytest.mark.parametrize("longer", [False, True])
def test_a_study_that_evaluated_on_shorter_rows_does_not_decide(longer: bool, tmp_path: Path) -> None:
    machine, rows = planned_machine("H100-80GB"), workload()
    measured, now = (replace(rows, evaluation=workload(lengths=each).dataset) for each in ({64: 4}, {64: 4, 900: 1}))
    here = problem(setting(machine=machine, of=measured))
    plan = here.trainer.plan(here.baseline, here.setting)
    write_study(tmp_path, measured, plan)
    config = Configuration("SFTConfig", plan.args, plan.args)
    sized = SizedPlan(plan, whole_geometry(here.trainer, plan, measured))
    checked = now if longer else measured
    assert (judge_by_study(config, sized, tmp_path, checked, machine, 80 * GIB) is None) is longer


@pytest.mark.parametrize(
    ("body", "phase"),
    [
        ("", MICRO_BATCH),
        ("per_device_train_batch_size: 1\nmax_length: 8\noptim: adamw_torch\n", OPTIMIZER_STEP),
        ("eval_strategy: epoch\ntest_split_size: 0.2\nper_device_eval_batch_size: 48\n", EVALUATE),
    ],
)
def test_a_traced_need_has_the_phase_of_its_peak(body: str, phase: str, write: Write, checked: Checked) -> None:
    need = checked(str(write("sft", body)), trainer="sft", gpu="H100-80GB").need
    assert need is not None
    assert need.phase == phase


@pytest.mark.nightly
@pytest.mark.parametrize("trainer", ["dpo", "kto"])
def test_a_pass_over_the_dataset_needs_memory_for_the_rows_that_it_has_at_once(
    trainer: str, write: Write, checked: Checked
) -> None:
    body = "use_cpu: true\nbf16: false\nprecompute_ref_log_probs: true\nprecompute_ref_batch_size: {}\n"
    needs = []
    for rows in (8, 48, 1000):
        need = checked(str(write(trainer, body.format(rows))), trainer=trainer, gpu="cpu").need
        assert need is not None
        needs.append(need.bytes)
    # The dataset has 48.
    assert 2 * needs[0] < needs[1] == needs[2]


@pytest.mark.parametrize("body", ["", pytest.param("packing: true\nmax_length: 1024\n", marks=pytest.mark.nightly)])
def test_a_step_of_one_process_has_at_most_the_rows_of_an_epoch(body: str, write: Write, checked: Checked) -> None:
    needs = []
    for rows, micro_batches in ((48, 1), (1000, 100)):
        sizes = f"per_device_train_batch_size: {rows}\ngradient_accumulation_steps: {micro_batches}\n"
        verdict = checked(str(write("sft", body + sizes)), trainer="sft", gpu="H100-80GB")
        assert verdict.need is not None
        assert verdict.documents_per_step == pytest.approx(48)
        assert verdict.need.rows * verdict.need.tokens < 48 * 60 + 1
        needs.append(verdict.need.bytes)
    assert needs[0] == needs[1]


def test_an_evaluation_before_the_first_step_alone_has_no_optimizer_state(
    model: Path, checked: Checked, tmp_path: Path
) -> None:
    rows = write_rows(tmp_path / "many.jsonl", [{"text": "a b c d " * 12}] * 96)

    def evaluating(**options: object) -> MemoryEstimate:
        config = sft(per_device_train_batch_size=1, per_device_eval_batch_size=96, **options)
        need = checked(config=config, model=str(model), dataset=str(rows), gpu="H100-80GB").need
        assert need is not None
        assert need.memory is not None
        assert need.phase == EVALUATE
        return need.memory

    first, between = evaluating(eval_on_start=True), evaluating(eval_strategy="epoch")
    assert "optimizer state" not in first.breakdown
    assert between.breakdown["optimizer state"] >= 2 * first.breakdown["parameter"]
    assert evaluating(eval_strategy="epoch", eval_on_start=True).breakdown == between.breakdown
