"""Probes of DPO: its rows, its reference, and where memory runs out in it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from datasets import load_from_disk

from autotune.core.measurement import Schedule
from autotune.core.plan import TrainingPlan
from autotune.core.protocol import PrepareReply, PrepareRequest, ProbeRequest
from autotune.core.status import ProbeStatus
from autotune.core.workload import DatasetSource, ModelSource
from autotune.probing import JobServer, prepare, probe
from autotune.step.run.batches import plan_batches
from autotune.step.run.meters import CpuMeter
from autotune.step.run.progress import Progress
from autotune.step.run.timing import WholeStep
from autotune.step.run.training import build_trainer, step_size, train
from autotune.step.trainers import adapter
from autotune.step.trainers.base import Collation
from autotune.trainers import find_trainer
from autotune.trainers.dpo import REFERENCE_PASS
from tests.small import long_tailed_texts, preference_rows, write_rows

SCHEDULE = Schedule(warmup_micro_batches=1, min_micro_batches=2, max_micro_batches=2)


@pytest.fixture(scope="module")
def pairs(job_server: JobServer, small_model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> PrepareReply:
    return prepared(job_server, small_model_directory, tmp_path_factory.mktemp("dpo"))


def prepared(server: JobServer, model: Path, folder: Path) -> PrepareReply:
    file = write_rows(folder / "pairs.jsonl", preference_rows(long_tailed_texts(60, longest_words=120)))
    source = DatasetSource(file.name, "json", str(file))
    request = PrepareRequest(ModelSource(str(model)), source, "dpo", str(folder / "tokenized"))
    return prepare(server, request, folder / "prepare")


def request_of(workload: PrepareReply, **args: object) -> ProbeRequest:
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_length": 64}
    plan = TrainingPlan("dpo", {"use_cpu": True, "bf16": False, **sizes, **args})
    source, rows = ModelSource(workload.model.name), workload.dataset.tokenized_directory
    return ProbeRequest(plan, source, "cpu", rows, SCHEDULE)


@pytest.mark.parametrize("precomputed", [False, True])
def test_a_probe_trains_on_the_rows_that_trl_keeps(pairs: PrepareReply, tmp_path: Path, precomputed: bool) -> None:
    request = request_of(pairs, max_length=20, precompute_ref_log_probs=precomputed)
    progress = Progress(SCHEDULE, CpuMeter())
    train(request, tmp_path, progress)
    rows = load_from_disk(pairs.dataset.tokenized_directory)
    kept = [row for row in rows if len(row["prompt_ids"]) < 20]
    assert 0 < len(kept) <= len(rows)
    assert progress.batches is not None
    assert progress.batches.population == len(kept)
    documents = pairs.dataset.documents
    assert documents.rows - documents.rows_dropped(20) == len(kept)
    geometry = find_trainer("dpo").geometry(request.plan, documents)
    # Chosen and rejected sequences lie in one tensor.
    assert progress.worst_tokens == 2 * geometry.worst.rows * geometry.worst.tokens


def test_asking_the_reference_beforehand_is_timed_and_spread_over_an_epoch(
    job_server: JobServer, pairs: PrepareReply, tmp_path: Path
) -> None:
    shown = probe(job_server, request_of(pairs, precompute_ref_log_probs=True), tmp_path)
    assert shown.status is ProbeStatus.OK, shown
    assert shown.pass_seconds > 0
    assert shown.rows is not None
    assert shown.step_seconds is not None
    assert shown.tokens_per_step is not None
    spread = shown.pass_seconds * 4 / shown.rows
    assert shown.tokens_per_second == pytest.approx(shown.tokens_per_step / (shown.step_seconds + spread))


@pytest.mark.parametrize("use_peft", [False, True], ids=["a copy", "adapters off"])
def test_what_fails_in_the_reference_is_told_as_that(pairs: PrepareReply, tmp_path: Path, use_peft: bool) -> None:
    request = request_of(pairs)
    words = {"use_peft": use_peft, "lora_target_modules": "all-linear"} if use_peft else {}
    request = replace(request, plan=replace(request.plan, model=words))
    progress = Progress(SCHEDULE, CpuMeter())
    rows = load_from_disk(pairs.dataset.tokenized_directory)
    trainer = build_trainer(request, rows, tmp_path, progress)
    reference = trainer.ref_model or trainer.model
    layer = reference.get_submodule(next(name for name, _ in reference.named_modules() if name.endswith("layers.0")))

    def fail(*_: object) -> None:
        if not torch.is_grad_enabled():
            raise MemoryError("nothing is left")

    layer.register_forward_pre_hook(fail)
    batches = plan_batches(adapter("dpo").sizes(trainer), step_size(request.plan), Collation(), SCHEDULE, 0, None)
    progress.batches, progress.whole_step = batches, WholeStep(2, 1.0)
    with pytest.raises(MemoryError):
        trainer.train()
    assert progress.phase == REFERENCE_PASS
