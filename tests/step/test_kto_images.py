"""Probes of KTO on rows with images: TRL's collator exchanges the answers of each of its micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import load_from_disk

from autotune.core.blocks import blocks_of
from autotune.core.measurement import Schedule
from autotune.core.plan import TrainingPlan
from autotune.core.protocol import PrepareReply, ProbeRequest
from autotune.core.workload import DatasetSource, ModelSource, Workload
from autotune.probing import JobServer
from autotune.step.run.evaluation import evaluated_sizes, rows_at_once
from autotune.step.run.meters import CpuMeter
from autotune.step.run.progress import Progress
from autotune.step.run.training import build_trainer, train
from autotune.step.trainers import adapter
from autotune.trainers import find_trainer
from autotune.trainers.evaluation import whole_geometry
from tests.step.test_images_tokenised import of_answers, prepared
from tests.vision import picture, write_small_vision_model

KTO, ADAPTER = find_trainer("kto"), adapter("kto")
SCHEDULE = Schedule(warmup_micro_batches=1, min_micro_batches=2, max_micro_batches=2, whole_steps=True)
TRAINED, EVALUATED = 3, 4
# The last block of an epoch has a row or two.
COUNTS = (0, 1, 2, 3, 1, 0, 0, 2, 0, 1, 3, 0, 1)
Sizes = tuple[int, int, int, int]


@dataclass(frozen=True)
class Found:
    """Rows with images, tokenised for a probe."""

    model: Path
    reply: PrepareReply

    @property
    def request(self) -> ProbeRequest:
        """A probe that evaluates on the rows that it trains on, in micro-batches of another size."""
        sizes = {"per_device_train_batch_size": TRAINED, "per_device_eval_batch_size": EVALUATED}
        further = {"gradient_accumulation_steps": 2, "max_length": 64, "eval_strategy": "epoch"}
        plan = TrainingPlan("kto", {"use_cpu": True, "bf16": False, **sizes, **further})
        rows = self.reply.dataset.tokenized_directory
        return ProbeRequest(
            plan, ModelSource(str(self.model), "random"), "cpu", rows, SCHEDULE, evaluation_directory=rows
        )

    def trainer(self, folder: Path) -> Any:
        """Return the trainer of the probe."""
        rows = load_from_disk(self.reply.dataset.tokenized_directory)
        return build_trainer(self.request, rows, folder, Progress(SCHEDULE, CpuMeter()))


@pytest.fixture(scope="module")
def found(job_server: JobServer, tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("kto")
    reply = prepared(job_server, "gemma3", of_answers([[picture(90, 60)] * count for count in COUNTS]), folder, "kto")
    return Found(write_small_vision_model(folder / "model", "gemma3", weights=False), reply)


def seen(batches: Iterable[Mapping[str, Any]]) -> list[Sizes]:
    """Return the rows of micro-batches, the widths of both tensors, and the numbers of their pixels."""
    nothing = torch.zeros(0)
    return [
        (*batch["input_ids"].shape, batch["KL_input_ids"].shape[1], batch.get("pixel_values", nothing).numel())
        for batch in batches
    ]


@pytest.mark.parametrize("evaluated", [False, True])
def test_blocks_are_those_of_trl_s_loader(found: Found, evaluated: bool, tmp_path: Path) -> None:
    trainer = found.trainer(tmp_path)
    loader = trainer.get_eval_dataloader() if evaluated else trainer.get_train_dataloader()
    real, rows = seen(loader), EVALUATED if evaluated else TRAINED
    sizes = evaluated_sizes(trainer, ADAPTER) if evaluated else ADAPTER.sizes(trainer)
    assert rows_at_once(trainer, ADAPTER) == EVALUATED
    blocks = blocks_of(sizes.widest, sizes.beside, rows, 1, sizes.image_elements)
    assert [(block.rows, block.tokens, block.beside, block.image_elements) for block in blocks] == real
    workload = Workload(
        "kto", found.request.model, DatasetSource("rows", "parquet"), found.reply.model, found.reply.dataset, {}
    )
    geometry = whole_geometry(KTO, found.request.plan, replace(workload, evaluation=found.reply.dataset))
    planned = geometry.evaluation if evaluated else geometry
    assert planned is not None
    assert {(shape.tokens, shape.beside) for shape in planned.shapes} <= {(own, kl) for _, own, kl, _ in real}


def test_a_probe_runs_the_blocks_with_the_most_tokens_and_image_data(found: Found, tmp_path: Path) -> None:
    real = seen(found.trainer(tmp_path / "real").get_train_dataloader())
    progress = Progress(SCHEDULE, CpuMeter())
    trainer = train(found.request, tmp_path, progress)
    assert progress.batches is not None
    blocks = [list(range(start, start + TRAINED)) for start in range(0, len(COUNTS) - 1, TRAINED)]
    assert all(sorted(set(rows)) in [*blocks, [12]] for rows in progress.batches.order.tolist())
    rows = [trainer.train_dataset.select(range(place * 3, place * 3 + 3)) for place in progress.batches.worst]
    ran = seen(trainer.data_collator(list(each)) for each in rows)
    for column in range(1, 4):
        assert max(sizes[column] for sizes in ran) == max(sizes[column] for sizes in real)
