"""Evaluation and saving in probes: the evaluated rows, the measurements, and running out of memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trl import SFTTrainer

from autotune.core.jobs.protocol import PrepareRequest, ProbeRequest
from autotune.core.measurement import Measurement
from autotune.core.plan import TrainingPlan
from autotune.core.program import EVALUATE, SAVE
from autotune.core.rows.batch_geometry import BatchGeometry, Shape
from autotune.core.status import ProbeStatus
from autotune.core.workload import DatasetSource, ModelSource, Workload
from autotune.errors import InputError, UnreadError
from autotune.probing import JobServer, probe
from autotune.step.rows import RowSizes
from autotune.step.run.meters import METERS
from autotune.step.run.progress import Progress
from autotune.step.run.training import (
    build_trainer,
    evaluation_batch_rows,
    evaluation_rows_as_training,
    extrapolate_evaluation,
    train,
)
from autotune.step.run.worst import worst_order
from autotune.step.trainers import Adapter, find_adapter
from autotune.trainers import find_trainer
from autotune.trainers.evaluation import whole_geometry
from autotune.units import MIB
from tests.small import long_tailed_texts, preference_rows, text_rows, write_rows, write_small_model
from tests.step.requests import BRIEF, prepared_here, probed_here

MakeWorkload = Callable[..., Workload]
TRAINED = [9, 30, 12, 44, 25, 18, 31, 40]
EVALUATED = [11, 57, 23, 8, 70, 38, 52, 14, 45, 29, 33]


def evaluated_sizes(trainer: Any, known: Adapter) -> RowSizes:
    """Return the sizes of the rows that a trainer evaluates on, after it has packed or dropped some."""
    with evaluation_rows_as_training(trainer, evaluation_batch_rows(trainer, known)):
        return known.sizes(trainer)


@pytest.fixture(scope="module")
def workload_of(tmp_path_factory: pytest.TempPathFactory) -> MakeWorkload:
    """Prepare rows to train on and rows to evaluate on, for a small model, once for all tests."""

    known: dict[str, Workload] = {}

    def make(trainer: str, trained: list[Any], evaluated: list[Any], **config: Any) -> Workload:
        key = repr((trainer, trained, evaluated, config))
        if key in known:
            return known[key]
        folder = tmp_path_factory.mktemp("evaluated")
        model = write_small_model(folder / "model", weights=False, **config)
        files = [write_rows(folder / f"{name}.jsonl", rows) for name, rows in (("a", trained), ("b", evaluated))]
        sources = [DatasetSource(file.name, "json", str(file)) for file in files]
        directories = [str(folder / name) for name in ("tokenized", "evaluation")]
        request = PrepareRequest(
            ModelSource(str(model)), sources[0], trainer, directories[0], sources[1], directories[1]
        )
        known[key] = prepared_here(request, folder / "prepare")
        return known[key]

    return make


def tokens(lengths: list[int]) -> list[dict[str, list[int]]]:
    return [{"input_ids": [7] * length} for length in lengths]


def request_of(found: Workload, args: Mapping[str, object], trainer: str = "sft", **more: Any) -> ProbeRequest:
    """Return a request for a probe that evaluates two rows at once."""
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "per_device_eval_batch_size": 2}
    plan = TrainingPlan(trainer, {"use_cpu": True, "max_length": 64, "eval_strategy": "epoch", **sizes, **args})
    assert found.evaluation is not None
    where = found.evaluation.tokenized_directory
    source = ModelSource(found.model.name)
    directory = found.dataset.tokenized_directory
    return replace(ProbeRequest(plan, source, "cpu", directory, BRIEF, evaluation_directory=where), **more)


def probed(server: JobServer, request: ProbeRequest, folder: Path) -> Measurement:
    return probe(server, request, folder / "probe", timeout_seconds=120.0)


def built(request: ProbeRequest, folder: Path) -> Any:
    from datasets import load_from_disk

    rows = find_adapter(request.plan.trainer).cut(load_from_disk(request.tokenized_directory), request.plan)
    return build_trainer(request, rows, folder, Progress(request.schedule, METERS["cpu"]()))


@pytest.mark.parametrize(
    ("trainer", "args"),
    [
        ("sft", {}),
        ("sft", {"pad_to_multiple_of": 16}),
        ("sft", {"packing": True}),
        ("sft", {"packing": True, "packing_strategy": "wrapped"}),
        ("sft", {"padding_free": True, "max_length": None}),
        ("sft", {"eval_packing": True}),
        ("sft", {"packing": True, "eval_packing": False}),
        ("dpo", {"max_length": 40}),
        ("dpo", {"precompute_ref_log_probs": True}),
    ],
    ids=str,
)
def test_no_micro_batch_of_trl_s_loader_is_larger_than_the_one_that_is_evaluated(
    workload_of: MakeWorkload, tmp_path: Path, trainer: str, args: dict[str, object]
) -> None:
    texts = long_tailed_texts(11, longest_words=60)
    evaluated = tokens(EVALUATED) if trainer == "sft" else preference_rows(texts)
    found = workload_of(trainer, tokens(TRAINED) if trainer == "sft" else preference_rows(texts[::-1]), evaluated)
    real, known = built(request_of(found, args, trainer), tmp_path), find_adapter(trainer)
    # In the order of a random sampler too: evaluation may be given rows in another order.
    shuffled = real.eval_dataset.shuffle(seed=1)
    for rows in (1, 3, 4, 16):
        real.args.per_device_eval_batch_size = rows
        sizes, of_batch = evaluated_sizes(real, known), evaluation_batch_rows(real, known)
        drawn = [
            known.rows_and_tokens(real, batch)[1]
            for data in (None, shuffled)
            for batch in real.get_eval_dataloader(data)
        ]
        largest = worst_order(sizes, of_batch, known.collation(real))
        chosen = [real.data_collator([real.eval_dataset[int(row)] for row in order]) for order in largest]
        most = max(known.rows_and_tokens(real, batch)[1] for batch in chosen)
        assert max(drawn) <= most, rows
        if "packing" not in args and "padding_free" not in args:
            # Padded rows: the micro-batch with the longest row is as large, unless that is the last and not full.
            full = int(np.argmax(sizes.row_summary.widest)) < len(real.eval_dataset) // of_batch * of_batch
            assert max(drawn) == most or not full, rows


# The four longest rows to evaluate on, of 64, 57, 52 and 45 tokens, padded to the longest.
WORST = Shape(4, 64, filled=0.852)


def evaluated_batch(request: ProbeRequest, folder: Path) -> tuple[int, int]:
    """Return the rows and the tokens of the largest micro-batch that a probe evaluates."""
    real, known = built(request, folder), find_adapter("sft")
    largest = worst_order(evaluated_sizes(real, known), evaluation_batch_rows(real, known), known.collation(real))[0]
    return known.rows_and_tokens(real, real.data_collator([real.eval_dataset[int(row)] for row in largest]))


def planned_geometry(found: Workload, request: ProbeRequest) -> BatchGeometry:
    source = DatasetSource("rows", "json")
    workload = Workload("sft", request.model, source, found.model, found.dataset, {}, source, found.evaluation)
    return whole_geometry(find_trainer("sft"), request.plan, workload)


def test_the_specification_says_which_micro_batch_is_evaluated(workload_of: MakeWorkload, tmp_path: Path) -> None:
    found = workload_of("sft", tokens(TRAINED), tokens(EVALUATED))
    request = request_of(found, {"per_device_eval_batch_size": 4})
    geometry = planned_geometry(found, request)
    assert geometry.evaluation is not None
    assert evaluated_batch(request, tmp_path) == (4, 4 * 64)
    assert geometry.evaluation.worst == WORST
    assert geometry.worst.tokens == max(TRAINED)


@pytest.mark.parametrize(
    ("args", "evaluated", "shape"),
    [
        # Rows of at most 44 tokens, packed into rows of 64 that are padded.
        ({"eval_packing": True}, TRAINED * 4, Shape(4, 64)),
        ({"eval_packing": True, "packing_strategy": "wrapped"}, TRAINED * 4, Shape(4, 64)),
        # A single row, which is split into as many as are evaluated at once.
        ({"eval_packing": True, "packing_strategy": "wrapped"}, [256], Shape(4, 64)),
        # The longest rows, each for itself, end to end.
        ({"packing": True, "eval_packing": False}, EVALUATED, Shape(1, 64 + 57 + 52 + 45)),
        ({"packing": True, "packing_strategy": "wrapped", "eval_packing": False}, EVALUATED, WORST),
    ],
    ids=str,
)
def test_rows_to_evaluate_on_are_packed_as_their_own_field_says(
    workload_of: MakeWorkload, tmp_path: Path, args: dict[str, object], evaluated: list[int], shape: Shape
) -> None:
    found = workload_of("sft", tokens(TRAINED), tokens(evaluated))
    request = request_of(found, {**args, "per_device_eval_batch_size": 4})
    geometry = planned_geometry(found, request).evaluation
    assert geometry is not None
    assert geometry.worst == shape
    assert evaluated_batch(request, tmp_path) == (shape.rows, shape.rows * shape.tokens)


@pytest.mark.parametrize("trainer", ["sft", "dpo"])
def test_a_probe_evaluates_and_the_confirming_run_saves(
    workload_of: MakeWorkload, tmp_path: Path, trainer: str
) -> None:
    texts = long_tailed_texts(12, longest_words=60)
    rows = text_rows(texts) if trainer == "sft" else preference_rows(texts)
    request = request_of(workload_of(trainer, rows, rows[:5]), {}, trainer)
    shown = probed_here(request, tmp_path / "plain")
    assert (shown.status, shown.reason) == (ProbeStatus.OK, "")
    program = find_trainer(trainer).program(request.plan)
    assert set(shown.peaks) == {*program.phases} - {SAVE}
    assert shown.evaluation_seconds is not None
    assert shown.evaluation_seconds > 0

    saving = probed_here(replace(request, schedule=replace(BRIEF, saves=True)), tmp_path / "saving")
    assert (saving.status, set(saving.peaks)) == (ProbeStatus.OK, set(program.phases))
    assert not list((tmp_path / "saving").rglob("*.safetensors"))

    brief = probed_here(replace(request, schedule=replace(BRIEF, timing_only=True)), tmp_path / "brief")
    assert (brief.evaluation_seconds, EVALUATE in brief.peaks) == (None, False)


@pytest.mark.parametrize(
    ("ended", "whole", "seconds"),
    [
        # Of 10 s, a loader's start and end take 3; two micro-batches of 20 tokens took 4.
        ([4.0, 6.0, 8.0], 600.0, 63.0),
        ([4.0, 6.0, 8.0], 70.0, 10.0),
        ([8.0], 700.0, 100.0),
    ],
)
def test_what_comes_once_in_an_evaluation_is_not_multiplied(ended: list[float], whole: float, seconds: float) -> None:
    assert extrapolate_evaluation(10.0, ended, np.array([30, 20, 20]), whole) == pytest.approx(seconds)


def test_the_micro_batches_of_the_last_step_are_held_while_a_probe_evaluates_as_trainer_holds_them(
    workload_of: MakeWorkload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch, evaluate = SFTTrainer.get_batch_samples, SFTTrainer.evaluate
    fetched, held = list[Any](), list[bool]()

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = fetch(self, *args, **kwargs)
        fetched[:] = [weakref.ref(batch["input_ids"]) for batch in found[0]]
        return found

    def evaluated(self: Any, *args: Any, **kwargs: Any) -> Any:
        held.extend(reference() is not None for reference in fetched)
        return evaluate(self, *args, **kwargs)

    monkeypatch.setattr(SFTTrainer, "get_batch_samples", noted)
    monkeypatch.setattr(SFTTrainer, "evaluate", evaluated)
    request = request_of(workload_of("sft", tokens(TRAINED), tokens(EVALUATED)), {"gradient_accumulation_steps": 2})
    train(request, tmp_path, Progress(BRIEF, METERS["cpu"]()))
    # It evaluates the largest micro-batches, and then some whose time it takes.
    assert held == [True] * 4


def test_an_evaluation_leaves_the_weights_in_their_dtype_as_one_between_two_steps(
    workload_of: MakeWorkload, tmp_path: Path
) -> None:
    request = request_of(workload_of("sft", tokens(TRAINED), tokens(EVALUATED)), {"bf16_full_eval": True})
    trainer = train(request, tmp_path, Progress(BRIEF, METERS["cpu"]()))
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}


def test_without_rows_to_evaluate_on_nothing_is_evaluated(workload_of: MakeWorkload, tmp_path: Path) -> None:
    request = request_of(workload_of("sft", tokens(TRAINED), tokens(EVALUATED)), {})
    plain = TrainingPlan("sft", {name: value for name, value in request.plan.args.items() if name != "eval_strategy"})
    shown = probed_here(replace(request, plan=plain, evaluation_directory=None), tmp_path)
    assert (shown.status, shown.evaluation_seconds, EVALUATE in shown.peaks) == (ProbeStatus.OK, None, False)


def test_longer_rows_to_evaluate_on_run_out_of_memory_in_evaluate(
    workload_of: MakeWorkload, job_server: JobServer, tmp_path: Path
) -> None:
    found = workload_of("sft", tokens([16] * 8), tokens([16] * 7 + [2000]), hidden_size=256, intermediate_size=2048)
    args = {"max_length": None, "per_device_eval_batch_size": 8, "bf16": False, "optim": "sgd"}
    request = request_of(found, args)
    short = replace(request, plan=replace(request.plan, args={**request.plan.args, "max_length": 16}))
    free = probed(job_server, short, tmp_path / "short")
    assert free.peak_bytes is not None
    # 8 rows of 2,000 tokens: a feed-forward layer alone makes 128 MiB of each of its products.
    shown = probed(job_server, replace(request, limit_bytes=free.peak_bytes + 96 * MIB), tmp_path / "long")
    assert shown.status is ProbeStatus.OUT_OF_MEMORY
    assert shown.out_of_memory is not None
    assert shown.out_of_memory.phase == EVALUATE
    assert shown.reason.startswith(f"in {EVALUATE}: ")
    assert "micro-batch" in shown.peaks


def test_a_save_writes_all_of_a_checkpoint_but_its_tensors(workload_of: MakeWorkload, tmp_path: Path) -> None:
    request = request_of(workload_of("sft", tokens(TRAINED), tokens(EVALUATED)), {})
    progress = Progress(BRIEF, METERS["cpu"]())
    trainer = train(replace(request, schedule=replace(BRIEF, saves=True)), tmp_path, progress)
    assert len(progress.evaluated_seconds) == 6, "two rows at once, of 11"
    (folder,) = Path(trainer.args.output_dir).glob("checkpoint-*")
    saved = {file.name for file in folder.iterdir()}
    assert {"config.json", "tokenizer.json", "trainer_state.json"} <= saved
    assert not any(name.endswith((".safetensors", ".pt", ".bin")) for name in saved)
    # Afterwards, the same call writes them.
    trainer._save_checkpoint(trainer.model, None)
    assert {"model.safetensors", "optimizer.pt"} <= {file.name for file in folder.iterdir()}


def test_rows_of_another_format_are_told(workload_of: MakeWorkload) -> None:
    told = r"train on, .*, are in the format input_ids, and those to evaluate on, .*, in text: TRL may take both"
    with pytest.raises(UnreadError, match=told):
        workload_of("sft", tokens(TRAINED), text_rows(["one", "two"]))


def test_a_split_that_is_not_there_is_told(tmp_path: Path) -> None:
    model = write_small_model(tmp_path / "model", weights=False)
    (tmp_path / "data").mkdir()
    for name in ("train", "validation"):
        write_rows(tmp_path / "data" / f"{name}.jsonl", tokens(TRAINED))
    sources = [DatasetSource("data", str(tmp_path / "data"), split=split) for split in ("train", "test")]
    request = PrepareRequest(ModelSource(str(model)), sources[0], "sft", str(tmp_path / "a"), sources[1], "")
    with pytest.raises(InputError, match="The dataset data has no split 'test'") as raised:
        prepared_here(request, tmp_path / "prepare")
    assert raised.value.hint.startswith("It has train, validation. Name one with --split or --eval-split,")
