"""A probe trains on the planned rows, and changes only those arguments that a probe needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from datasets import load_from_disk
from trl import SFTTrainer

from autotune.core.measurement import Schedule
from autotune.core.plan import TrainingPlan
from autotune.core.program import FORWARD
from autotune.core.workload import Workload
from autotune.step.objects import (
    config,
    model_init_kwargs,
    peft_config,
    quantization_config,
    teacher_init_kwargs,
)
from autotune.step.trainers import find_adapter
from tests.step.requests import plan, probe_request, trained

SCHEDULE = Schedule(warmup_micro_batches=2, min_micro_batches=4, max_micro_batches=4)


@pytest.mark.parametrize(
    "training_plan",
    [
        plan(rows=2, micro_batches=2),
        plan({"packing": True}),
        plan({"packing": True, "packing_strategy": "wrapped"}),
        plan({"padding_free": True, "max_length": None}, truncate_to=40),
    ],
    ids=["padded", "bfd", "wrapped", "padding-free"],
)
def test_trl_counts_the_tokens_that_the_probe_counts(
    small_workload: Workload, tmp_path: Path, training_plan: TrainingPlan
) -> None:
    progress, trainer = trained(probe_request(small_workload, training_plan, schedule=SCHEDULE), tmp_path)
    assert progress.steps_done == progress.batches.steps
    assert trainer._total_train_tokens == find_adapter("sft").sizes(trainer).tokens.sum()
    assert progress.phase == FORWARD
    timed = progress.batches.timed
    micro_batches = progress.timed.micro_batches
    assert [item.collated for item in micro_batches] == progress.batches.collated[timed].tolist()
    in_step = progress.batches.step_micro_batches
    assert [item.special for item in micro_batches] == [not index % in_step for index in np.flatnonzero(timed)]
    assert len(progress.timed.updates) == sum(timed) // in_step


class Seen(SFTTrainer):
    """Notes the length of each row of each micro-batch, and the tokens that the collator made of them."""

    # Where an adapter replaces functions of TRL's.
    __module__ = SFTTrainer.__module__
    lengths: ClassVar[list[list[int]]] = []
    collated: ClassVar[list[int]] = []

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if "attention_mask" in inputs:
            self.lengths.append(inputs["attention_mask"].sum(dim=1).tolist())
        self.collated.append(inputs["input_ids"].numel())
        return super().compute_loss(model, inputs, *args, **kwargs)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> type[Seen]:
    monkeypatch.setattr(find_adapter("sft"), "trainer", Seen)
    monkeypatch.setattr(Seen, "lengths", [])
    monkeypatch.setattr(Seen, "collated", [])
    return Seen


def test_batches_come_in_the_order_that_was_chosen(small_workload: Workload, tmp_path: Path, seen: type[Seen]) -> None:
    request = probe_request(small_workload, plan(rows=2, micro_batches=2), schedule=SCHEDULE)
    progress, trainer = trained(request, tmp_path)
    lengths = [len(row) for row in trainer.train_dataset["input_ids"][:]]
    count = len(seen.lengths)
    assert seen.lengths == [lengths[start : start + 2] for start in range(0, 2 * count, 2)]
    assert seen.lengths[0] == [64, 57]
    assert [seen.lengths[place] for place in progress.batches.worst] == [[64, 57], [64, 64]]


@pytest.mark.parametrize(
    "training_plan",
    [
        plan(rows=3),
        plan({"pad_to_multiple_of": 16}, rows=3),
        plan({"packing": True}),
        plan({"packing": True, "packing_strategy": "wrapped"}),
        plan({"padding_free": True, "max_length": None, "pad_to_multiple_of": 16}, truncate_to=40),
    ],
    ids=["padded", "rounded", "bfd", "wrapped", "padding-free"],
)
def test_micro_batches_are_as_large_as_trls_collator_makes_them(
    small_workload: Workload, tmp_path: Path, seen: type[Seen], training_plan: TrainingPlan
) -> None:
    progress, _ = trained(probe_request(small_workload, training_plan, schedule=SCHEDULE), tmp_path)
    assert seen.collated == progress.batches.collated.tolist()
    assert progress.worst_tokens == seen.collated[0] == max(seen.collated)


def test_a_run_of_whole_steps_ends_with_the_worst_micro_batches_again(
    small_workload: Workload, tmp_path: Path, seen: type[Seen]
) -> None:
    schedule = replace(SCHEDULE, whole_steps=True, worst_last=True, max_seconds=0.0)
    request = probe_request(small_workload, plan(rows=2, micro_batches=5), schedule=schedule)
    progress, _ = trained(request, tmp_path)
    steps = [seen.lengths[start : start + 5] for start in range(0, len(seen.lengths), 5)]
    assert len(steps) == progress.steps_done
    assert len(steps[-1]) == 5
    assert steps[1][-2:] == steps[-1][-2:] == [[64, 57], [64, 64]]
    assert all(step[-2:] != steps[1][-2:] for step in steps[progress.batches.worst_steps : -1])


def test_a_probe_holds_the_tensors_of_the_micro_batches_that_it_leaves_out(
    small_workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []

    class Counting(SFTTrainer):
        __module__ = SFTTrainer.__module__

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            held.append(len(self._extra_batches))
            return super().training_step(*args, **kwargs)

    monkeypatch.setattr(find_adapter("sft"), "trainer", Counting)
    request = probe_request(small_workload, plan(rows=2, micro_batches=7), schedule=SCHEDULE)
    progress, _ = trained(request, tmp_path)
    worst = progress.batches.worst_steps * 2
    assert held == [5] * worst + [0] * (len(held) - worst)


def test_nothing_but_what_a_probe_needs_is_changed(small_workload: Workload, tmp_path: Path) -> None:
    args = {"learning_rate": 0.125, "weight_decay": 0.5, "optim": "sgd", "dataloader_num_workers": 1}
    training_plan = plan(args, rows=1)
    _, trainer = trained(probe_request(small_workload, training_plan, schedule=SCHEDULE), tmp_path)
    planned, run = config(training_plan, output_dir="planned").to_dict(), trainer.args.to_dict()
    # transformers mirrors a deprecated field, a model that is there already takes no arguments, and tokenised rows only
    # have columns that are read.
    expected = {
        "output_dir", "max_steps", "train_sampling_strategy", "save_strategy", "eval_strategy", "logging_strategy",
        "report_to", "disable_tqdm", "model_init_kwargs", "gradient_accumulation_steps",
        "remove_unused_columns",
    }  # fmt: skip
    assert {name for name, value in run.items() if planned[name] != value} <= expected


def test_rows_cut_beforehand_lose_their_tail_and_go_when_no_label_is_left(
    small_workload: Workload, tmp_path: Path
) -> None:
    saved = load_from_disk(small_workload.dataset.tokenized_directory)
    labels = [[-100] * 10 + row[10:] for row in saved["labels"][:]]
    masked = saved.remove_columns("labels").add_column("labels", labels)
    masked.save_to_disk(str(tmp_path / "masked"))
    request = probe_request(small_workload, plan({"max_length": None}, truncate_to=12))
    request = type(request)(**{**vars(request), "tokenized_directory": str(tmp_path / "masked")})
    rows = find_adapter("sft").cut(load_from_disk(request.tokenized_directory), request.plan)
    kept = [row for row in saved["input_ids"][:] if len(row) > 10]
    assert rows["input_ids"][:] == [row[:12] for row in kept]
    assert 0 < len(rows) < len(saved)


def test_objects_are_those_of_trls_own_script() -> None:
    training_plan = TrainingPlan(
        "sft",
        {"max_length": 99, "model_init_kwargs": {"use_kernels": True}},
        {"dtype": "bfloat16", "attn_implementation": "eager", "use_peft": True, "lora_r": 3, "load_in_4bit": True},
    )
    assert model_init_kwargs(training_plan) == {
        "revision": "main",
        "trust_remote_code": False,
        "attn_implementation": "eager",
        "dtype": "bfloat16",
        "use_kernels": True,
    }
    arguments = config(training_plan, output_dir="x", use_cpu=True, max_length=7)
    assert arguments.max_length == 7
    assert arguments.model_init_kwargs == model_init_kwargs(training_plan)
    lora, quantization = peft_config(training_plan), quantization_config(training_plan)
    assert lora is not None
    assert lora.r == 3
    assert quantization is not None
    assert quantization.load_in_4bit
    plain = TrainingPlan("sft")
    assert peft_config(plain) is None
    assert quantization_config(plain) is None


def test_the_code_of_neither_model_nor_teacher_is_trusted_whatever_the_arguments_say() -> None:
    trusting = {"trust_remote_code": True, "dtype": "bfloat16"}
    names = ("model_init_kwargs", "teacher_model_init_kwargs")
    training_plan = TrainingPlan("distillation", {"teacher_model_name_or_path": "t", **dict.fromkeys(names, trusting)})
    for kwargs in (model_init_kwargs(training_plan), teacher_init_kwargs(training_plan)):
        assert (kwargs["trust_remote_code"], kwargs["dtype"]) == (False, "bfloat16")
