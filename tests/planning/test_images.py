"""Plans of rows with images: traces train on the rows themselves, collated by TRL with the model's processor."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.app.workload import WorkloadReader
from autotune.core.events import ignore
from autotune.inspection.dataset import dataset_source
from autotune.inspection.gpus import find_gpu
from autotune.inspection.model import model_source
from autotune.planning.single import PlanTracer, SizedPlan
from autotune.planning.tracing.cache import Cache
from autotune.planning.tracing.store import Traces
from autotune.probing import JobServer
from autotune.probing.tracing import ServerTracer
from autotune.trainers import find_trainer
from autotune.trainers.evaluation import whole_geometry
from tests.settings import GPU, plan_with, setting
from tests.step.test_images_tokenised import of_answers, of_prompts, rows_of
from tests.vision import picture, write_small_vision_model


@pytest.mark.parametrize(
    ("trainer", "family"),
    [
        ("sft", "gemma3"),
        *(
            pytest.param(trainer, family, marks=pytest.mark.nightly)
            for trainer, family in (("kto", "gemma3"), ("grpo", "gemma3"), ("sft", "llava_next"))
        ),
    ],
)
def test_few_layers_show_what_all_layers_need(job_server: JobServer, tmp_path: Path, trainer: str, family: str) -> None:
    model = write_small_vision_model(tmp_path / "model", family, weights=False, layers=6)
    made_of = {"sft": rows_of, "kto": of_answers}.get(trainer, of_prompts)
    rows = made_of([[picture(90, 60)] * max(made_of is of_prompts, number % 3) for number in range(8)])
    rows.to_parquet(str(tmp_path / "rows.parquet"))
    source = dataset_source(str(tmp_path / "rows.parquet"))
    with ServerTracer(1, ignore) as tracer:
        reader = WorkloadReader(job_server, tmp_path, ignore)
        here = setting(machine=GPU, of=reader.read(trainer, model_source(str(model), "random"), source))
        groups = {"num_generations": 2} if find_trainer(trainer).generates else {}
        plan = plan_with(here, {"per_device_train_batch_size": 4, **groups}, trainer)
        geometry = whole_geometry(find_trainer(trainer), plan, here.workload)
        steps = PlanTracer(Traces(tracer, Cache(tmp_path), "model", {}), here, find_gpu("H100-80GB"))
        few, every = (steps.memory(SizedPlan(plan, geometry), whole=whole) for whole in (False, True))
    # Of rows with the same text, those with two images are the longest; there are two of them, in different blocks.
    assert {2, 5} & set(geometry.worst.chosen) if trainer == "kto" else {2, 5} < set(geometry.worst.chosen)
    assert few.peak_bytes == pytest.approx(every.peak_bytes, rel=0.001)
    assert few.step_seconds == pytest.approx(every.step_seconds, rel=0.01)
    assert few.host_bytes == pytest.approx(every.host_bytes, rel=0.001)
