"""Probes of KTO: its fixed blocks of rows, its mismatched pairs, its passes, and what it cannot train on."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, load_dataset, load_from_disk
from transformers import AutoModelForCausalLM
from trl import KTOConfig, KTOTrainer

from autotune.core.batch_geometry import Layout, Shape
from autotune.core.blocks import blocks_of, worst_blocks
from autotune.core.measurement import Schedule
from autotune.core.plan import TrainingPlan
from autotune.core.protocol import ProbeRequest
from autotune.core.status import ProbeStatus
from autotune.core.workload import ModelSource
from autotune.errors import InputError
from autotune.step.job import JobContext
from autotune.step.jobs.probe import probe
from autotune.step.run.batches import block_rows, plan_batches
from autotune.step.run.meters import CpuMeter
from autotune.step.run.progress import Progress
from autotune.step.run.timing import WholeStep
from autotune.step.run.training import build_trainer, step_size, train
from autotune.step.trainers import adapter
from autotune.trainers import find_trainer
from autotune.trainers.kto import POLICY_KL, PRECOMPUTE, REFERENCE_KL, REFERENCE_PASS
from tests.small import small_config, small_tokenizer
from tests.trainers.prepared import Prepared, prepared_rows, prepared_sample

SCHEDULE = Schedule(warmup_micro_batches=1, min_micro_batches=2, max_micro_batches=2)
KTO, ADAPTER = find_trainer("kto"), adapter("kto")
UNPAIRED, PAIRED = "prompt+completion+label", "prompt+chosen+rejected"


@pytest.fixture(scope="module", params=[UNPAIRED, PAIRED])
def found(request: pytest.FixtureRequest, small_model_directory: Path, tmp_path_factory: Any) -> Prepared:
    return prepared_sample(KTO, request.param, small_model_directory, tmp_path_factory.mktemp("kto"))


def request_of(found: Prepared, **args: object) -> ProbeRequest:
    sizes = {"per_device_train_batch_size": 5, "gradient_accumulation_steps": 2, "max_length": 64}
    plan = TrainingPlan("kto", {"use_cpu": True, "bf16": False, **sizes, **args})
    rows = found.reply.dataset.tokenized_directory
    return ProbeRequest(plan, ModelSource(str(found.model)), "cpu", rows, SCHEDULE)


def of_trl(found: Prepared, folder: Path, eval_dataset: Dataset | None = None, **args: Any) -> KTOTrainer:
    """Return TRL's own trainer on the rows as the user wrote them."""
    config = KTOConfig(
        str(folder), use_cpu=True, bf16=False, report_to="none", **{"per_device_train_batch_size": 5, **args}
    )
    return KTOTrainer(
        model=AutoModelForCausalLM.from_config(small_config()),
        ref_model=AutoModelForCausalLM.from_config(small_config()),
        args=config,
        train_dataset=load_dataset("json", data_files=found.source.data_files, split="train"),
        eval_dataset=eval_dataset,
        processing_class=small_tokenizer(),
    )


def widths(batches: Sequence[Mapping[str, torch.Tensor]]) -> list[tuple[int, int, int]]:
    return [(*batch["input_ids"].shape, batch["KL_input_ids"].shape[1]) for batch in batches]


@pytest.mark.parametrize("length", [64, 30])
def test_blocks_and_their_mismatched_pairs_are_those_of_trl_on_the_user_s_rows(
    found: Prepared, length: int, tmp_path: Path
) -> None:
    seen = widths(list(of_trl(found, tmp_path / "trl", max_length=length).get_train_dataloader()))
    request = request_of(found, max_length=length)
    built = build_trainer(request, found.rows, tmp_path, Progress(SCHEDULE, CpuMeter()))
    sizes = ADAPTER.sizes(built)
    assert sizes.beside is not None
    blocks = blocks_of(sizes.widest, sizes.beside, 5)
    assert [(block.rows, block.tokens, block.beside) for block in blocks] == seen
    # Some are dropped, and the last block of an epoch has fewer rows.
    assert sum(rows for rows, _, _ in seen) < found.reply.dataset.documents.rows or length == 64
    geometry = KTO.geometry(request.plan, found.reply.dataset.documents)
    chosen = [seen[place] for place in worst_blocks(blocks)]
    assert {(shape.tokens, shape.beside) for shape in geometry.shapes} == {(own, kl) for _, own, kl in chosen}
    for rows, own, kl in seen:
        assert any(5 * shape.tokens >= rows * own and 5 * shape.beside >= rows * kl for shape in geometry.shapes)


@pytest.mark.parametrize("rows", [2, 5, 7])
def test_answers_are_exchanged_in_evaluation_among_as_many_rows_as_in_training(
    found: Prepared, rows: int, tmp_path: Path
) -> None:
    data = load_dataset("json", data_files=found.source.data_files, split="train")
    built = of_trl(found, tmp_path, eval_dataset=data, max_length=64, per_device_eval_batch_size=rows)
    seen = widths(list(built.get_eval_dataloader()))
    said = KTO.evaluated(request_of(found).plan, found.reply.dataset.documents, rows)
    assert {(shape.tokens, shape.beside) for shape in said.shapes} <= {(own, kl) for _, own, kl in seen}
    for count, own, kl in seen:
        assert any(rows * shape.tokens >= count * own and rows * shape.beside >= count * kl for shape in said.shapes)


def test_a_probe_s_micro_batches_are_whole_blocks(found: Prepared, tmp_path: Path) -> None:
    request = request_of(found)
    progress = Progress(SCHEDULE, CpuMeter())
    trainer = train(request, tmp_path, progress)
    batches = progress.batches
    assert batches is not None
    whole = {tuple(block) for block in block_rows(batches.population, 5).tolist()}
    assert all(tuple(rows) in whole for rows in batches.order.tolist())
    rows = trainer.train_dataset
    for start in range(0, len(rows), 5):
        block = rows[start : start + 5]
        answers = block["completion_ids"]
        assert block["KL_completion_ids"] == [answers[-1], *answers[:-1]]


def test_every_block_that_may_need_the_most_memory_runs_when_gradients_exist(found: Prepared, tmp_path: Path) -> None:
    progress = Progress(SCHEDULE, CpuMeter())
    trainer = train(request_of(found, max_length=200), tmp_path, progress)
    assert progress.batches is not None
    said = KTO.geometry(request_of(found, max_length=200).plan, found.reply.dataset.documents)
    counted = ADAPTER.sizes(trainer).trainable.reshape(-1, 5).sum(axis=1)
    ran, most = [], []
    for place in progress.batches.worst:
        rows = [trainer.train_dataset[place * 5 + row] for row in range(5)]
        batch = trainer.data_collator(rows)
        ran.append((batch["input_ids"].shape[1], batch["KL_input_ids"].shape[1]))
        most.append(int(counted[place]))
    widest = [(shape.tokens, shape.beside) for shape in said.shapes]
    different = list(dict.fromkeys(ran))
    assert different[: len(widest)] == widest
    # Beside the widest, at most the block with the most tokens that the loss counts.
    assert len(different) <= len(widest) + 1
    assert max(most) == counted.max()
    assert progress.worst_tokens == said.worst.rows * said.worst.tokens


PHASES: dict[str, tuple[dict[str, object], dict[str, object], list[str]]] = {
    "a copy": ({}, {}, [POLICY_KL, REFERENCE_KL, REFERENCE_PASS]),
    "adapters off": (
        {}, {"use_peft": True, "lora_target_modules": "all-linear"}, [POLICY_KL, REFERENCE_KL, REFERENCE_PASS],
    ),
    "precomputed": ({"precompute_ref_log_probs": True}, {}, [POLICY_KL]),
    "without KL": ({"loss_type": "apo_zero_unpaired"}, {}, [REFERENCE_PASS]),
    "precomputed without KL": ({"loss_type": "apo_zero_unpaired", "precompute_ref_log_probs": True}, {}, []),
}  # fmt: skip


@pytest.mark.parametrize("case", PHASES)
def test_passes_without_gradients_are_the_phases_of_the_program(found: Prepared, case: str, tmp_path: Path) -> None:
    args, words, expected = PHASES[case]
    request = request_of(found, **args)
    request = replace(request, plan=replace(request.plan, model=words))
    seen: list[str] = []

    class Heard(Progress):
        def inside(self, phase: str) -> Any:
            seen.append(phase)
            return super().inside(phase)

    progress = Heard(SCHEDULE, CpuMeter())
    train(request, tmp_path, progress)
    assert progress.batches is not None
    before = [PRECOMPUTE] if "precompute_ref_log_probs" in args else []
    assert seen == before + expected * (progress.steps_done * progress.batches.step_micro_batches)
    names = KTO.program(request.plan).names
    assert [name for name in names if name in seen] == before + expected


@pytest.mark.parametrize("use_peft", [False, True], ids=["a copy", "adapters off"])
@pytest.mark.parametrize("phase", [POLICY_KL, REFERENCE_KL, REFERENCE_PASS])
def test_what_fails_in_a_pass_is_told_as_that(found: Prepared, tmp_path: Path, use_peft: bool, phase: str) -> None:
    request = request_of(found)
    words = {"use_peft": use_peft, "lora_target_modules": "all-linear"} if use_peft else {}
    request = replace(request, plan=replace(request.plan, model=words))
    progress = Progress(SCHEDULE, CpuMeter())
    trainer = build_trainer(request, found.rows, tmp_path, progress)

    def fail(*_: object) -> None:
        if progress.phase == phase:
            raise MemoryError("nothing is left")

    for model in {trainer.ref_model or trainer.model, trainer.model}:
        layer = next(module for name, module in model.named_modules() if name.endswith("layers.0"))
        layer.register_forward_pre_hook(fail)
    batches = plan_batches(
        ADAPTER.sizes(trainer), step_size(request.plan), ADAPTER.collation(trainer), SCHEDULE, 0, None
    )
    progress.batches, progress.whole_step = batches, WholeStep(2, 1.0)
    with pytest.raises(MemoryError):
        trainer.train()
    assert progress.phase == phase


def test_asking_the_reference_beforehand_is_timed_and_spread_over_an_epoch(found: Prepared, tmp_path: Path) -> None:
    request = request_of(found, precompute_ref_log_probs=True)
    shown = probe(request, JobContext(tmp_path, time.monotonic())).ranks[0]
    assert shown.status is ProbeStatus.OK, shown
    assert shown.pass_seconds > 0
    assert shown.rows is not None
    assert shown.step_seconds is not None
    assert shown.tokens_per_step is not None
    spread = shown.pass_seconds * 10 / shown.rows
    assert shown.tokens_per_second == pytest.approx(shown.tokens_per_step / (shown.step_seconds + spread))


def test_the_rows_to_evaluate_on_do_not_count_for_those_to_train_on(
    found: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_of(found, precompute_ref_log_probs=True, eval_strategy="epoch", per_device_eval_batch_size=5)
    asked, after = ADAPTER.trainer_class(request.plan), {}
    ask = asked._precompute_ref_logps

    def noted(trainer: Any, dataset: Dataset, name: str, batch_size: int) -> Dataset:
        rows = ask(trainer, dataset, name, batch_size)
        after[name] = dict(trainer.seconds_per_row)
        return rows

    monkeypatch.setattr(asked, "_precompute_ref_logps", noted)
    request = replace(request, evaluation_directory=request.tokenized_directory)
    trainer = build_trainer(request, found.rows, tmp_path, Progress(SCHEDULE, CpuMeter()))
    assert list(after) == ["train", "eval"]
    assert ADAPTER.pass_seconds_per_row(trainer) == after["train"]


def test_pairs_become_desirable_answers_then_undesirable_ones(small_model_directory: Path, tmp_path: Path) -> None:
    found = prepared_sample(KTO, PAIRED, small_model_directory, tmp_path)
    labels = load_from_disk(found.reply.dataset.tokenized_directory)["label"]
    assert list(labels) == sorted(labels, reverse=True)
    assert found.reply.dataset.documents.rows == len(labels) == 2 * sum(labels)


@pytest.mark.parametrize("label", ["yes", -1, 2, 0.5, None])
def test_labels_are_true_or_false(label: object, small_model_directory: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": " b", "label": label}] * 2
    with pytest.raises(InputError, match=r"Row 1 of rows.jsonl has (the label|no label)"):
        prepared_rows(KTO, rows, small_model_directory, tmp_path)


def test_labels_may_be_zeros_and_ones(small_model_directory: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": " b c", "label": place % 2} for place in range(4)]
    found = prepared_rows(KTO, rows, small_model_directory, tmp_path)
    assert found.reply.dataset.documents.rows == 4


def test_a_dataset_smaller_than_a_block_repeats_its_rows(tmp_path: Path) -> None:
    assert block_rows(3, 5).tolist() == [[0, 1, 2, 0, 1]]
    assert block_rows(7, 3).tolist() == [[0, 1, 2], [3, 4, 5], [6, 6, 6]]
    assert np.array_equal(block_rows(4, 2), [[0, 1], [2, 3]])


def test_traced_rows_make_the_widths_of_both_tensors() -> None:
    for rows in (2, 3, 8):
        for tokens in (12, 33):
            for beside in range((tokens + 3) // 2, 2 * tokens - 1):
                for trainable in (0.1, 0.5, 0.9):
                    made = KTO.traced_rows(Layout.PADDED, Shape(rows, tokens, beside=beside), trainable)
                    prompts, answers = zip(*made, strict=True)
                    assert min(answers) > 0
                    assert min(prompts) >= 0
                    (block,) = blocks_of(
                        [prompt + answer for prompt, answer in made],
                        [prompt + answer for prompt, answer in zip(prompts, (answers[-1], *answers[:-1]), strict=True)],
                        rows,
                    )
                    assert (block.rows, block.tokens, block.beside) == (rows, tokens, beside)
                    assert block.padded


def test_synthetic_rows_are_labelled_in_turn() -> None:
    made: Dataset = ADAPTER.synthetic(((3, 4), (2, 5)), TrainingPlan("kto", {}), None, 1.0)
    assert made["label"][:] == [True, False]
