"""The traced need of a configuration: its speed, and how far from its device's memory it is traced whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.app.check.need import traced
from autotune.app.planned import planned_machine
from autotune.core.setting import Wishes
from autotune.core.verdict import Need, Outcome, Source, Verdict
from autotune.planning.single import PlanTracer, Sized
from autotune.planning.tracing.cache import Cache
from autotune.planning.tracing.store import Traces
from autotune.reporting.check import verdict_report
from autotune.trainers.evaluation import whole_geometry
from autotune.units import GIB
from tests.planning.stand_in import AnalyticTracer
from tests.settings import problem, setting, workload


def need_of(lengths: dict[int, int], folder: Path, budget_bytes: int) -> Need:
    machine = planned_machine("H100-80GB")
    here = problem(setting(machine=machine, of=workload(lengths=lengths)), Wishes({"packing": "none"}))
    plan = here.trainer.plan(here.baseline, here.setting)
    tracer = PlanTracer(Traces(AnalyticTracer(), Cache(folder), "model", {}), here.setting, machine.gpu)
    sized = Sized(plan, whole_geometry(here.trainer, plan, here.setting.workload))
    need = traced(tracer, sized, machine, budget_bytes).need
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
        verdict = Verdict(1, Outcome.FITS, "", "", budget_bytes=0, need=need)
        found = verdict_report(verdict).verdict
        assert found is not None
        return " ".join(found.evidence)

    assert far.source is near.source is Source.TRACED
    assert "few layers" in evidence(far)
    assert "few layers" not in evidence(near)
