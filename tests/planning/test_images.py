"""Plans of rows with images: traces train on the rows themselves, collated by TRL with the model's processor."""

from __future__ import annotations

from pathlib import Path

import pytest
from datasets import Dataset

from autotune.app.workload import WorkloadReader
from autotune.core.candidate import Choice
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
from tests.planning.test_own_sizes import plain_products
from tests.settings import GPU, plan_with, setting
from tests.step.test_images_tokenised import of_answers, of_prompts, rows_of
from tests.vision import WITH_TORCHVISION, picture, write_small_vision_model


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("trainer", "family"),
    [
        ("sft", "gemma3"),
        pytest.param(
            "sft", "qwen3_vl", marks=pytest.mark.skipif(not WITH_TORCHVISION, reason="it is loaded with torchvision")
        ),
        ("kto", "gemma3"),
        ("grpo", "gemma3"),
        ("sft", "llava_next"),
    ],
)
def test_few_layers_show_what_all_layers_need(
    tracer: ServerTracer, job_server: JobServer, tmp_path: Path, trainer: str, family: str
) -> None:
    model = write_small_vision_model(tmp_path / "model", family, weights=False, layers=6)
    made_of = {"sft": rows_of, "kto": of_answers}.get(trainer, of_prompts)
    rows = made_of([[picture(90, 60)] * max(made_of is of_prompts, number % 3) for number in range(8)])
    rows.to_parquet(str(tmp_path / "rows.parquet"))
    source = dataset_source(str(tmp_path / "rows.parquet"))
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


@pytest.mark.nightly
@plain_products
def test_rows_of_equal_length_need_no_more_memory_alone_than_among_longer_ones(
    tracer: ServerTracer, job_server: JobServer, tmp_path: Path
) -> None:
    """Without padding there is no mask, without which attention in float32 stores the scores of grouped heads."""
    model = write_small_vision_model(tmp_path / "model", "llava_next", weights=False)
    lengths = [900, 900, 950, 5]
    rows = rows_of([[picture(32, 32)]] * len(lengths))
    longer = [
        {**row, "messages": [{**row["messages"][0], "content": "what " * words}, *row["messages"][1:]]}
        for row, words in zip(rows, lengths, strict=True)
    ]
    every = Dataset.from_list(longer, features=rows.features)

    def needed(tracer: ServerTracer, chosen: Dataset, name: str) -> int:
        folder = tmp_path / name
        folder.mkdir()
        chosen.to_parquet(str(folder / "rows.parquet"))
        source = dataset_source(str(folder / "rows.parquet"))
        reader = WorkloadReader(job_server, folder, ignore)
        here = setting(machine=GPU, of=reader.read("sft", model_source(str(model), "random"), source))
        choices: dict[str, Choice] = {"per_device_train_batch_size": 2, "precision": "float32"}
        plan = plan_with(here, {**choices, "gradient_checkpointing": "off"})
        geometry = whole_geometry(find_trainer("sft"), plan, here.workload)
        steps = PlanTracer(Traces(tracer, Cache(tmp_path), "model", {}), here, find_gpu("H100-80GB"))
        return steps.memory(SizedPlan(plan, geometry)).device_bytes

    alone, among = needed(tracer, every.select([0, 1]), "alone"), needed(tracer, every, "among")
    assert among >= alone
