"""Probes of KTO: fixed blocks of rows, with or without images, mismatched pairs, and refused rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, load_dataset, load_from_disk
from transformers import AutoModelForCausalLM
from trl import KTOConfig, KTOTrainer

from autotune.core.jobs.protocol import PrepareRequest, ProbeRequest
from autotune.core.measurement import Schedule
from autotune.core.plan import TrainingPlan
from autotune.core.rows.batch_geometry import Layout, Shape
from autotune.core.rows.blocks import block_rows, blocks_of
from autotune.core.rows.heaviest import heaviest_blocks
from autotune.core.workload import DatasetSource, ModelSource
from autotune.errors import InputError
from autotune.step.run.meters import CpuMeter
from autotune.step.run.progress import Progress
from autotune.step.run.training import build_trainer, evaluation_batch_rows
from autotune.step.trainers import find_adapter
from autotune.trainers import find_trainer
from autotune.trainers.evaluation import whole_geometry
from tests.small import small_config, small_tokenizer
from tests.step.requests import trained
from tests.step.test_evaluation import evaluated_sizes
from tests.step.test_images_tokenised import of_answers, prepared
from tests.trainers.prepared import Prepared, prepared_rows, prepared_sample
from tests.vision import picture

SCHEDULE = Schedule(warmup_micro_batches=1, min_micro_batches=2, max_micro_batches=2)
KTO, ADAPTER = find_trainer("kto"), find_adapter("kto")
UNPAIRED, PAIRED = "prompt+completion+label", "prompt+chosen+rejected"


@pytest.fixture(scope="module", params=[UNPAIRED, PAIRED])
def found(request: pytest.FixtureRequest, small_model_directory: Path, tmp_path_factory: Any) -> Prepared:
    return prepared_sample(KTO, request.param, small_model_directory, tmp_path_factory.mktemp("kto"))


def request_of(found: Prepared, **args: object) -> ProbeRequest:
    sizes = {"per_device_train_batch_size": 5, "gradient_accumulation_steps": 2, "max_length": 64}
    return found.request(TrainingPlan("kto", {"use_cpu": True, "bf16": False, **sizes, **args}), SCHEDULE)


def of_trl(
    found: Prepared, folder: Path, eval_dataset: Dataset | None = None, rows: Dataset | None = None, **args: Any
) -> KTOTrainer:
    """Return TRL's own trainer on the rows as the user wrote them, or on others."""
    config = KTOConfig(
        str(folder), use_cpu=True, bf16=False, report_to="none", **{"per_device_train_batch_size": 5, **args}
    )
    return KTOTrainer(
        model=AutoModelForCausalLM.from_config(small_config()),
        ref_model=AutoModelForCausalLM.from_config(small_config()),
        args=config,
        train_dataset=rows or load_dataset("json", data_files=found.asked.dataset.data_files, split="train"),
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
    assert sizes.second_tokens is not None
    blocks = blocks_of(sizes.row_summary.widest, sizes.second_tokens, 5)
    assert [(block.rows, block.tokens, block.second_tokens) for block in blocks] == seen
    # Some are dropped, and the last block of an epoch has fewer rows.
    assert sum(rows for rows, _, _ in seen) < found.reply.dataset.documents.rows or length == 64
    geometry = KTO.geometry(request.plan, found.reply.dataset.documents)
    chosen = [seen[rows[0] // 5] for rows in heaviest_blocks(sizes.row_summary, 5, 1)]
    assert {(shape.tokens, shape.second_tokens) for shape in geometry.shapes} == {(own, kl) for _, own, kl in chosen}
    for rows, own, kl in seen:
        assert any(5 * shape.tokens >= rows * own and 5 * shape.second_tokens >= rows * kl for shape in geometry.shapes)


@pytest.mark.parametrize("count", [1, 6])
def test_trl_trains_on_a_single_row_and_on_answers_of_one_kind(found: Prepared, count: int, tmp_path: Path) -> None:
    rows = Dataset.from_list([{"prompt": "a b", "completion": f" c {i}", "label": True} for i in range(count)])
    built = of_trl(found, tmp_path, rows=rows, max_steps=1)
    assert built.train().global_step == 1


def test_an_evaluation_of_which_trl_drops_all_rows_has_no_loss(found: Prepared, tmp_path: Path) -> None:
    rows = Dataset.from_list([{"prompt": "a b " * 40, "completion": " c", "label": True}] * 2)
    assert "eval_loss" not in of_trl(found, tmp_path, rows, max_length=64).evaluate()


@pytest.mark.parametrize("rows", [2, 5, 7])
def test_answers_are_exchanged_in_evaluation_among_as_many_rows_as_in_training(
    found: Prepared, rows: int, tmp_path: Path
) -> None:
    data = load_dataset("json", data_files=found.asked.dataset.data_files, split="train")
    built = of_trl(found, tmp_path, eval_dataset=data, max_length=64, per_device_eval_batch_size=rows)
    seen = widths(list(built.get_eval_dataloader()))
    said = KTO.evaluation_geometry(request_of(found).plan, found.reply.dataset.documents, rows)
    assert {(shape.tokens, shape.second_tokens) for shape in said.shapes} <= {(own, kl) for _, own, kl in seen}
    for count, own, kl in seen:
        assert any(
            rows * shape.tokens >= count * own and rows * shape.second_tokens >= count * kl for shape in said.shapes
        )


def test_a_probe_s_micro_batches_are_whole_blocks(found: Prepared, tmp_path: Path) -> None:
    progress, trainer = trained(request_of(found), tmp_path)
    batches = progress.batches
    whole = {tuple(block) for block in block_rows(batches.population, 5).tolist()}
    assert all(tuple(rows) in whole for rows in batches.order.tolist())
    rows = trainer.train_dataset
    for start in range(0, len(rows), 5):
        block = rows[start : start + 5]
        answers = block["completion_ids"]
        assert block["KL_completion_ids"] == [answers[-1], *answers[:-1]]


def test_every_block_that_may_need_the_most_memory_runs_when_gradients_exist(found: Prepared, tmp_path: Path) -> None:
    progress, trainer = trained(request_of(found, max_length=200), tmp_path)
    said = KTO.geometry(request_of(found, max_length=200).plan, found.reply.dataset.documents)
    counted = ADAPTER.sizes(trainer).trainable.reshape(-1, 5).sum(axis=1)
    ran, most = [], []
    for place in progress.batches.worst:
        rows = [trainer.train_dataset[place * 5 + row] for row in range(5)]
        batch = trainer.data_collator(rows)
        ran.append((batch["input_ids"].shape[1], batch["KL_input_ids"].shape[1]))
        most.append(int(counted[place]))
    widest = [(shape.tokens, shape.second_tokens) for shape in said.shapes]
    different = list(dict.fromkeys(ran))
    assert different[: len(widest)] == widest
    # Beside the widest, at most the block with the most tokens that the loss counts.
    assert len(different) <= len(widest) + 1
    assert max(most) == counted.max()
    assert progress.worst_tokens == said.worst.rows * said.worst.tokens


def test_the_rows_to_evaluate_on_do_not_count_for_those_to_train_on(
    found: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_of(found, precompute_ref_log_probs=True, eval_strategy="epoch", per_device_eval_batch_size=5)
    asked: Any = ADAPTER.on_rows
    ask, after = asked._precompute_ref_logps, {}

    def noted(trainer: Any, dataset: Dataset, name: str, batch_size: int) -> Dataset:
        rows = ask(trainer, dataset, name, batch_size)
        after[name] = trainer.seconds_per_row
        return rows

    monkeypatch.setattr(asked, "_precompute_ref_logps", noted)
    request = replace(request, evaluation_directory=request.tokenized_directory)
    trainer = build_trainer(request, found.rows, tmp_path, Progress(SCHEDULE, CpuMeter()))
    assert list(after) == ["train", "eval"]
    assert trainer.seconds_per_row == after["train"]


def test_pairs_become_desirable_answers_then_undesirable_ones(small_model_directory: Path, tmp_path: Path) -> None:
    found = prepared_sample(KTO, PAIRED, small_model_directory, tmp_path)
    labels = load_from_disk(found.reply.dataset.tokenized_directory)["label"]
    assert list(labels) == sorted(labels, reverse=True)
    assert found.reply.dataset.documents.rows == len(labels) == 2 * sum(labels)


def test_a_row_needs_a_label(small_model_directory: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": " b", "label": None}] * 2
    with pytest.raises(InputError, match=r"rows.jsonl has no label in 2 of 2 rows"):
        prepared_rows(KTO, rows, small_model_directory, tmp_path)


@pytest.mark.parametrize("label", [-1, 2, 0.5])
def test_other_numbers_than_0_are_desirable(label: float, small_model_directory: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": f" b {place}", "label": label if place % 2 else 0} for place in range(4)]
    read = prepared_rows(KTO, rows, small_model_directory, tmp_path)
    assert read.reply.dataset.remarks == (f"rows.jsonl has {label} as label: KTO takes every number but 0 for true.",)
    built = of_trl(read, tmp_path, rows=Dataset.from_list(rows), max_steps=1, per_device_train_batch_size=4)
    assert built.train().global_step == 1


def test_labels_may_be_zeros_and_ones(small_model_directory: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": " b c", "label": place % 2} for place in range(4)]
    found = prepared_rows(KTO, rows, small_model_directory, tmp_path)
    assert found.reply.dataset.documents.rows == 4


def test_a_dataset_smaller_than_a_block_repeats_its_rows() -> None:
    assert block_rows(3, 5).tolist() == [[0, 1, 2, 0, 1]]
    assert block_rows(7, 3).tolist() == [[0, 1, 2], [3, 4, 5], [6, 6, 6]]
    assert np.array_equal(block_rows(4, 2), [[0, 1], [2, 3]])


def test_traced_rows_make_the_widths_of_both_tensors() -> None:
    for rows in (2, 3, 8):
        for tokens in (12, 33):
            for second_tokens in range((tokens + 3) // 2, 2 * tokens - 1):
                for trainable in (0.1, 0.5, 0.9):
                    made = KTO.traced_rows(Layout.PADDED, Shape(rows, tokens, second_tokens=second_tokens), trainable)
                    prompts, answers = zip(*made, strict=True)
                    assert min(answers) > 0
                    assert min(prompts) >= 0
                    (block,) = blocks_of(
                        [prompt + answer for prompt, answer in made],
                        [prompt + answer for prompt, answer in zip(prompts, (answers[-1], *answers[:-1]), strict=True)],
                        rows,
                    )
                    assert (block.rows, block.tokens, block.second_tokens) == (rows, tokens, second_tokens)
                    assert block.padded


def test_synthetic_rows_are_labelled_in_turn() -> None:
    made: Dataset = ADAPTER.synthetic(((3, 4), (2, 5)), TrainingPlan("kto", {}), 1.0)
    assert made["label"][:] == [True, False]


TRAINED, EVALUATED = 3, 4
# The last block of an epoch has a row or two.
COUNTS = (0, 1, 2, 3, 1, 0, 0, 2, 0, 1, 3, 0, 1)
Sizes = tuple[int, int, int, int]


@pytest.fixture(scope="module")
def pictured(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """Rows with images, to train on and to evaluate on in micro-batches of another size."""
    folder = tmp_path_factory.mktemp("kto")
    reply = prepared("gemma3", of_answers([[picture(90, 60)] * count for count in COUNTS]), folder, "kto")
    source = DatasetSource("rows", "parquet")
    asked = PrepareRequest(ModelSource(str(folder / "gemma3"), "random"), source, "kto", "", source)
    return Prepared(KTO, asked, replace(reply, evaluation=reply.dataset))


def pictured_request(found: Prepared) -> ProbeRequest:
    sizes = {"per_device_train_batch_size": TRAINED, "per_device_eval_batch_size": EVALUATED}
    further = {"gradient_accumulation_steps": 2, "max_length": 64, "eval_strategy": "epoch"}
    plan = TrainingPlan("kto", {"use_cpu": True, "bf16": False, **sizes, **further})
    return found.request(plan, replace(SCHEDULE, whole_steps=True))


def pictured_trainer(found: Prepared, folder: Path) -> Any:
    request = pictured_request(found)
    return build_trainer(request, found.rows, folder, Progress(request.schedule, CpuMeter()))


def sizes_of(batches: Iterable[Mapping[str, Any]]) -> list[Sizes]:
    """Return the rows of micro-batches, the widths of both tensors, and the numbers of their pixels."""
    nothing = torch.zeros(0)
    return [
        (*batch["input_ids"].shape, batch["KL_input_ids"].shape[1], batch.get("pixel_values", nothing).numel())
        for batch in batches
    ]


@pytest.mark.parametrize("evaluated", [False, True])
def test_blocks_of_pictured_rows_are_those_of_trl_s_loader(pictured: Prepared, evaluated: bool, tmp_path: Path) -> None:
    trainer = pictured_trainer(pictured, tmp_path)
    loader = trainer.get_eval_dataloader() if evaluated else trainer.get_train_dataloader()
    real, rows = sizes_of(loader), EVALUATED if evaluated else TRAINED
    sizes = evaluated_sizes(trainer, ADAPTER) if evaluated else ADAPTER.sizes(trainer)
    assert evaluation_batch_rows(trainer, ADAPTER) == EVALUATED
    blocks = blocks_of(sizes.row_summary.widest, sizes.second_tokens, rows, 1, sizes.image_elements)
    assert [(block.rows, block.tokens, block.second_tokens, block.image_elements) for block in blocks] == real
    geometry = whole_geometry(KTO, pictured_request(pictured).plan, pictured.workload)
    planned = geometry.evaluation if evaluated else geometry
    assert planned is not None
    assert {(shape.tokens, shape.second_tokens) for shape in planned.shapes} <= {(own, kl) for _, own, kl, _ in real}


def test_a_probe_runs_the_blocks_with_the_most_tokens_and_image_data(pictured: Prepared, tmp_path: Path) -> None:
    real = sizes_of(pictured_trainer(pictured, tmp_path / "real").get_train_dataloader())
    progress, trainer = trained(pictured_request(pictured), tmp_path)
    blocks = [list(range(start, start + TRAINED)) for start in range(0, len(COUNTS) - 1, TRAINED)]
    assert all(sorted(set(rows)) in [*blocks, [12]] for rows in progress.batches.order.tolist())
    rows = [trainer.train_dataset.select(range(place * 3, place * 3 + 3)) for place in progress.batches.worst]
    ran = sizes_of(trainer.data_collator(list(each)) for each in rows)
    for column in range(1, 4):
        assert max(each[column] for each in ran) == max(each[column] for each in real)
