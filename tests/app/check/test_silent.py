"""Findings about silent behaviour: weights that lose updates, and the steps of an epoch."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import datasets
import pytest
from accelerate.utils import concatenate
from datasets import Dataset
from torch.distributed.fsdp import StateDictType
from transformers import Trainer
from transformers.trainer_pt_utils import AcceleratorConfig
from trl.scripts.utils import DatasetConfig, DatasetMixtureConfig, get_dataset
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from autotune.app.check.silent import checkpoint_findings, dispatch_findings, row_findings, silent_findings
from autotune.core.candidate import Choice
from autotune.core.configuration import Configuration
from autotune.core.documents.verdict import Finding, Severity
from autotune.core.plan import Launch, TrainingPlan
from autotune.core.rows.lengths import LengthDistribution
from autotune.core.setting import Setting
from autotune.core.workload import DatasetSource
from autotune.trainers import find_trainer
from autotune.trainers.evaluation import whole_geometry
from autotune.userconfig.candidate import NearestCandidate
from tests.settings import plan_with, problem, setting, workload

HALF: Mapping[str, object] = {"dtype": "bfloat16"}
ZERO2: Mapping[str, object] = {"deepspeed": {"zero_optimization": {"stage": 2}}}
FSDP2: Mapping[str, object] = {"fsdp": True, "fsdp_config": {"version": 2}}


def findings_of(
    plan: TrainingPlan, here: Setting, given: Mapping[str, object] | None = None, *, drops_last: bool = False
) -> list[Finding]:
    trainer = find_trainer(plan.trainer)
    known = NearestCandidate(problem(here, trainer=plan.trainer).baseline, frozenset())
    geometry = whole_geometry(trainer, plan, here.workload)
    return list(silent_findings(plan, geometry, trainer, here, known, given or {}, drops_last=drops_last))


def findings(
    plan: TrainingPlan, here: Setting, given: Mapping[str, object] | None = None, *, drops_last: bool = False
) -> str:
    return "\n".join(item.message for item in findings_of(plan, here, given, drops_last=drops_last))


@pytest.mark.parametrize(
    ("args", "rounded"),
    [
        ({"bf16": True}, True),
        ({"bf16": True, **ZERO2}, False),
        ({"bf16": True, **FSDP2}, False),
        ({"fp16": True, **FSDP2}, False),
        ({"bf16": False, **FSDP2}, True),
    ],
    ids=str,
)
def test_half_precision_weights_lose_updates_unless_an_engine_keeps_them_in_float32(
    args: Mapping[str, object], rounded: bool
) -> None:
    here = setting()
    plan = plan_with(here, {})
    plan = replace(plan, args={**plan.args, "bf16": False, "fp16": False, **args}, model={**plan.model, **HALF})
    assert ("rounded away" in findings(plan, here)) is rounded


@pytest.mark.parametrize("trainer", ["sft", "grpo"])
def test_rows_beyond_the_positions_that_a_model_embeds_end_a_training_unless_some_tokens_are_generated(
    trainer: str,
) -> None:
    of = workload(lengths={100: 100})
    here = setting(of=replace(of, trainer=trainer, model=replace(of.model, max_positions=64, embeds_positions=True)))
    plan = plan_with(here, {}, trainer)
    (found,) = (item for item in findings_of(plan, here) if "64 positions" in item.message)
    assert found.severity is (Severity.ERROR if trainer == "sft" else Severity.SILENT)


SHARDED: Mapping[str, object] = {"fsdp": True, "fsdp_config": {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}}


def zero3(further: Mapping[str, object], **keys: object) -> Mapping[str, object]:
    """Return the arguments of ZeRO-3; ``further`` are sections beside that of ZeRO."""
    return {"deepspeed": {"zero_optimization": {"stage": 3, **keys}, **further}}


@pytest.mark.parametrize(
    ("args", "words", "told"),
    [
        (SHARDED, {}, "state_dict_type: SHARDED_STATE_DICT, accelerate's default, saves shards in checkpoints, and no"),
        (FSDP2, {}, ""),
        (zero3({}), {}, "ZeRO-3 without stage3_gather_16bit_weights_on_model_save: true saves shards"),
        (zero3({}, stage3_gather_16bit_weights_on_model_save="auto"), {}, "saves shards"),
        (zero3({}, stage3_gather_16bit_weights_on_model_save=True), {}, ""),
        (zero3({}, stage3_gather_fp16_weights_on_model_save=True), {}, ""),
        (zero3({}), {"use_peft": True}, ""),
        (ZERO2, {}, ""),
        ({}, {}, ""),
    ],
    ids=str,
)
def test_an_engine_that_saves_no_model_is_told(
    args: Mapping[str, object], words: Mapping[str, object], told: str
) -> None:
    here = setting()
    plan = plan_with(here, {})
    found = findings(replace(plan, args={**plan.args, **args}, model={**plan.model, **words}), here)
    assert told in found
    assert ("saves shards" in found) is bool(told)


def test_transformers_saves_no_model_of_shards() -> None:
    saved: list[str] = []
    for kind in StateDictType:
        state = SimpleNamespace(fsdp_plugin=SimpleNamespace(state_dict_type=kind))
        accelerator = SimpleNamespace(state=state, get_state_dict=lambda _: {})
        trainer: Any = SimpleNamespace(
            is_fsdp_enabled=True, accelerator=accelerator, model=None,
            args=SimpleNamespace(push_to_hub=False, should_save=True),
            _save=lambda *_, kind=kind, **__: saved.append(kind.name),
        )  # fmt: skip
        Trainer.save_model(trainer, "out")
    assert saved == ["FULL_STATE_DICT"]


def test_times_of_deepspeed_s_own_are_not_those_of_a_plan() -> None:
    here = setting()
    plan = plan_with(here, {})
    for on in (True, False):
        sections = {"flops_profiler": {"enabled": on}, "wall_clock_breakdown": on}
        found = findings(replace(plan, args={**plan.args, **zero3(sections)}), here)
        assert ("speeds are without flops_profiler and wall_clock_breakdown" in found) is on


@pytest.mark.parametrize(
    ("engine", "own", "told"),
    [
        (ZERO2, {"load_best_model_at_end": True}, True),
        (ZERO2, {"resume_from_checkpoint": True}, True),
        (ZERO2, {"load_best_model_at_end": False}, False),
        (FSDP2, {"load_best_model_at_end": True}, False),
        ({}, {"load_best_model_at_end": True}, False),
    ],
    ids=str,
)
def test_a_checkpoint_that_deepspeed_reads_is_left_out_and_told(
    engine: Mapping[str, object], own: Mapping[str, object], told: bool
) -> None:
    found = list(checkpoint_findings(TrainingPlan("sft", engine), Configuration("SFTConfig", own, {})))
    assert ["reads all weights and its share of optimizer state" in item.message for item in found] == [True] * told


@pytest.mark.parametrize(("trainer", "told"), [("sft", False), ("kto", True)])
def test_blocks_of_rows_that_trl_shuffles_are_those_of_the_file_and_told(trainer: str, told: bool) -> None:
    mixture = DatasetMixtureConfig([DatasetConfig("json")], test_split_size=0.25)
    rows = Dataset.from_dict({"row": list(range(64))})
    with mock.patch.object(datasets, "load_dataset", return_value=rows):
        trained = get_dataset(mixture)["train"]["row"]
    assert list(trained) != sorted(trained)
    (found,) = row_findings(DatasetSource("rows", "rows", test_size=0.25), find_trainer(trainer), streams=False)
    assert ("TRL shuffles them, so a larger one may be drawn" in found.message) is told


@pytest.mark.parametrize(
    ("rows", "args", "assumed"),
    [
        (5000, {"packing": True}, True),
        (5000, {"packing": True, "shuffle_dataset": True}, False),
        (5000, {}, False),
        # They are packed at once, in whatever order.
        (500, {"packing": True}, False),
    ],
)
def test_packing_in_the_order_of_the_file_is_noted(rows: int, args: Mapping[str, object], assumed: bool) -> None:
    here = setting(of=workload(lengths={100: rows}))
    plan = plan_with(here, {})
    assert (
        "Packing is computed for rows in random order" in findings(replace(plan, args={**plan.args, **args}), here)
    ) is assumed


@pytest.mark.parametrize(("stored", "rounded"), [("bfloat16", True), ("float32", False), ("", False)])
def test_weights_of_the_checkpoint_s_type_lose_updates_if_that_is_half(stored: str, rounded: bool) -> None:
    here = setting(of=workload(dtype=stored))
    plan = replace(plan_with(here, {}), model={"dtype": "auto", "use_peft": False})
    assert ("The weights are trained in bfloat16, without a copy" in findings(plan, here)) is rounded


def test_keys_that_another_key_has_to_switch_on_are_reported_without_it() -> None:
    here = setting()
    plan = replace(plan_with(here, {}), model={"dtype": "float32", "use_peft": False})
    given = {"lora_r": 64, "use_dora": True, "bnb_4bit_quant_type": "nf4", "fsdp_config": {"cpu_offload": True}}
    found = findings(plan, here, given)
    assert "fsdp_config has no effect without fsdp: true." in found
    assert "lora_r, use_dora have no effect without use_peft: true." in found
    assert "bnb_4bit_quant_type has no effect without load_in_4bit: true." in found
    on = {"use_peft": True, "load_in_4bit": True}
    switched = replace(plan, model={**plan.model, **on}, args={**plan.args, **FSDP2})
    assert "no effect" not in findings(switched, here, given)


@pytest.mark.parametrize(
    ("drops_last", "accumulated", "ranks", "steps"),
    [(False, 1, 1, 13), (True, 1, 1, 12), (False, 5, 1, 3), (True, 4, 1, 3), (False, 1, 2, 7), (True, 1, 2, 6)],
)
def test_an_epoch_has_the_steps_that_the_loader_has_rows_for(
    drops_last: bool, accumulated: int, ranks: int, steps: int
) -> None:
    here = setting()
    plan = plan_with(here, {"packing": "none"})
    sizes = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": accumulated}
    plan = replace(plan, args={**plan.args, **sizes}, launch=Launch(ranks))
    assert f"an epoch has {steps} steps." in findings(plan, here, drops_last=drops_last)


@pytest.mark.parametrize(
    ("rows", "ranks", "given", "severity"),
    [
        (16, 1, {}, None),
        (15, 1, {}, Severity.SILENT),
        (16, 2, {}, Severity.SILENT),
        (15, 1, {"load_best_model_at_end": True}, Severity.ERROR),
        (15, 1, {"metric_for_best_model": "loss"}, Severity.ERROR),
    ],
    ids=str,
)
def test_an_evaluation_of_too_few_rows_has_no_loss(
    rows: int, ranks: int, given: Mapping[str, object], severity: Severity | None
) -> None:
    known = workload()
    profile = replace(known.dataset, lengths=LengthDistribution({100: rows}))
    here = setting(of=replace(known, evaluation=profile, evaluation_source=known.dataset_source))
    plan = plan_with(here, {"packing": "none", "per_device_train_batch_size": 1, "per_device_eval_batch_size": 16})
    plan = replace(plan, launch=Launch(ranks))
    found = [item for item in findings_of(plan, here, given, drops_last=True) if "has no loss" in item.message]
    assert [item.severity for item in found] == ([] if severity is None else [severity])
    assert all(f"drops all {rows} rows of an evaluation" in item.message for item in found)
    assert all(f"a micro-batch of all processes has {16 * ranks}." in item.message for item in found)


@pytest.mark.parametrize(
    ("tokens", "flat", "error"), [((3, 5), False, RuntimeError), ((3, 3), True, TypeError), ((3, 3), False, None)]
)
def test_accelerate_joins_padded_micro_batches_of_one_width(
    tokens: tuple[int, int], flat: bool, error: type[Exception] | None
) -> None:
    # As `DataLoaderDispatcher._fetch_batches` does with those of all processes.
    collator = DataCollatorForLanguageModeling(0, padding_free=flat)
    batches = [collator([{"input_ids": [1] * count}]) for count in tokens]
    with pytest.raises(error) if error is not None else nullcontext():
        assert concatenate(batches)["input_ids"].shape == (2, 3)


@pytest.mark.parametrize(
    ("trainer", "choices", "ranks", "ends"),
    [
        ("sft", {"max_length": 1024}, 2, True),
        ("sft", {"max_length": 1024}, 1, False),
        # All rows are at least as long.
        ("sft", {"max_length": 20}, 2, False),
        ("sft", {"max_length": 20, "packing": "wrapped"}, 2, True),
        ("grpo", {}, 2, True),
    ],
    ids=str,
)
def test_micro_batches_that_one_process_reads_for_all_have_to_be_as_wide(
    trainer: str, choices: Mapping[str, Choice], ranks: int, ends: bool
) -> None:
    here = setting(of=workload(trainer=trainer))
    plan = replace(plan_with(here, choices, trainer), launch=Launch(ranks))
    known = find_trainer(trainer)
    geometry = whole_geometry(known, plan, here.workload)
    for dispatches, error in ((True, ends), (False, False)):
        given = {"dispatch_batches": dispatches}
        # As of a file, and of a configuration object.
        for value in (given, AcceleratorConfig(**given)):
            config = Configuration("SFTConfig", {"accelerator_config": value}, {})
            found = list(dispatch_findings(plan, geometry, known, here.workload, config))
            assert [(item.severity, item.key) for item in found] == [(Severity.ERROR, "accelerator_config")] * error


@pytest.mark.parametrize(
    ("accumulated", "ranks", "left_out"), [(8, 1, "4 of 100"), (4, 2, "4 of 100"), (8, 4, "4 of 100")]
)
def test_prompts_that_fill_no_generation_are_left_out_of_an_epoch(accumulated: int, ranks: int, left_out: str) -> None:
    here = setting(of=workload(trainer="grpo"))
    plan = plan_with(here, {}, "grpo")
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": accumulated, "num_generations": 4}
    plan = replace(plan, args={**plan.args, **sizes}, launch=Launch(ranks))
    whole = accumulated * ranks
    said = f"An epoch leaves out {left_out} prompts, drawn anew each epoch: a generation batch has {whole}."
    assert said in findings(plan, here)
    assert "leaves out" not in findings(replace(plan, args={**plan.args, "steps_per_generation": 1}), here)


def test_an_optimizer_step_is_counted_in_rows_and_in_prompts() -> None:
    here = setting(of=workload(trainer="grpo"))
    plan = plan_with(here, {}, "grpo")
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 4}
    plan = replace(plan, args={**plan.args, **sizes}, launch=Launch(2))
    said = "An optimizer step trains on 16 completions of 4 prompts (4 rows x 2 accumulated x 2 processes); an epoch"
    assert said in findings(plan, here)
