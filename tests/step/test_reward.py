"""Reward models: the trained class and head, dropped rows, margins, and adapters."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import AutoConfig, AutoModelForSequenceClassification
from trl import RewardConfig, RewardTrainer

from autotune.core.jobs.protocol import CheckPackingRequest, ProbeRequest
from autotune.core.measurement import Schedule
from autotune.core.plan import TrainingPlan
from autotune.core.status import ProbeStatus
from autotune.core.workload import ModelSource
from autotune.errors import InputError
from autotune.step.job import JobContext
from autotune.step.jobs.check_packing import check_packing
from autotune.step.models.loading import load_config, load_processor, loaded_model
from autotune.step.run.meters import CpuMeter
from autotune.step.run.progress import Progress
from autotune.step.run.training import build_trainer
from autotune.step.trainers import find_adapter
from autotune.trainers import find_trainer
from tests.small import long_tailed_texts, preference_rows, small_config, small_tokenizer
from tests.step.requests import probed_here, trained
from tests.trainers.prepared import Prepared, prepared_rows
from tests.trainers.samples import Rows

SCHEDULE = Schedule(warmup_micro_batches=1, min_micro_batches=2, max_micro_batches=2)
REWARD = find_trainer("reward")
HEAD = find_adapter("reward").head
ADAPTERS = {"use_peft": True, "lora_r": 4, "lora_target_modules": "all-linear", "lora_task_type": "SEQ_CLS"}


def pair_rows() -> Rows:
    return preference_rows(long_tailed_texts(60, longest_words=120))


@pytest.fixture(scope="module")
def pairs(small_model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepared_rows(REWARD, pair_rows(), small_model_directory, tmp_path_factory.mktemp("reward"))


def request_of(found: Prepared, model: dict[str, object] | None = None, **args: object) -> ProbeRequest:
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_length": 64}
    return found.request(
        TrainingPlan("reward", {"use_cpu": True, "bf16": False, **sizes, **args}, model or {}), SCHEDULE
    )


@pytest.mark.parametrize("outputs", [1, 2])
def test_a_saved_head_of_several_outputs_is_refused_as_by_trl(outputs: int, tmp_path: Path) -> None:
    config = small_config(num_labels=outputs)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "model")
    small_tokenizer().save_pretrained(tmp_path / "model")
    saved = AutoConfig.from_pretrained(tmp_path / "model")
    with pytest.raises(InputError, match="has a head of num_labels=2") if outputs > 1 else nullcontext():
        HEAD.configured(saved, "model")
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes") if outputs > 1 else nullcontext():
        kept_by_trl(tmp_path / "model", tmp_path / "trained", pair_rows(), 64)


def kept_by_trl(model: Path, folder: Path, rows: Rows, length: int) -> Any:
    """Return the rows that TRL's own trainer keeps."""
    args = RewardConfig(str(folder), use_cpu=True, bf16=False, max_length=length, report_to="none")
    dataset = Dataset.from_list(rows)
    return RewardTrainer(str(model), args=args, train_dataset=dataset).train_dataset


@pytest.mark.parametrize("length", [20, 40, 90])
def test_rows_are_dropped_as_trl_drops_them_and_none_is_cut(
    pairs: Prepared, small_model_directory: Path, tmp_path: Path, length: int
) -> None:
    kept = kept_by_trl(small_model_directory, tmp_path, pair_rows(), length)
    documents = pairs.reply.dataset.documents
    assert 0 < len(kept) < documents.rows
    assert documents.rows_kept(length) == documents.rows_kept(length, whole=True) == len(kept)
    tokens = sum(len(row["chosen_ids"]) + len(row["rejected_ids"]) for row in kept)
    assert documents.tokens_kept(length) == tokens

    request = request_of(pairs, max_length=length)
    progress, _ = trained(request, tmp_path)
    assert progress.batches.population == len(kept)
    geometry = REWARD.geometry(request.plan, documents)
    assert progress.worst_tokens == 2 * geometry.worst.rows * geometry.worst.tokens


def test_a_loaded_model_has_the_weights_of_the_one_that_trl_loads(small_model_directory: Path, tmp_path: Path) -> None:
    kept = Dataset.from_list(pair_rows()[:2])
    args = RewardConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    loaded = RewardTrainer(str(small_model_directory), args=args, train_dataset=kept).model
    kwargs = {"dtype": "float32", "attn_implementation": "sdpa"}
    drawn = loaded_model(ModelSource(str(small_model_directory)), kwargs, None, "cpu", HEAD)
    assert type(drawn) is type(loaded)
    assert {name: tensor.shape for name, tensor in drawn.named_parameters()} == {
        name: tensor.shape for name, tensor in loaded.named_parameters()
    }
    assert drawn.score.weight.shape == (1, 64)


def test_its_profile_is_of_the_model_that_is_trained(pairs: Prepared) -> None:
    assert pairs.reply.model.architecture == "LlamaForSequenceClassification"
    config = HEAD.configured(small_config(), "small")
    assert (config.architectures, config.num_labels) == (["LlamaForSequenceClassification"], 1)
    # One output of 64 numbers; the head that predicts tokens shares the embeddings' weights.
    assert pairs.reply.model.parameters == 64 + sum(
        parameter.numel()
        for parameter in loaded_model(
            pairs.asked.model,
            {"dtype": "float32", "attn_implementation": "sdpa"},
            None,
            "cpu",
            find_adapter("sft").head,
        ).parameters()
    )


def test_a_model_that_cannot_score_is_refused_by_its_family(tmp_path: Path) -> None:
    config = AutoConfig.for_model("mamba", num_hidden_layers=1, hidden_size=16, vocab_size=64)
    config.architectures = ["MambaForCausalLM"]
    config.save_pretrained(tmp_path)
    source = ModelSource(str(tmp_path))
    assert load_config(source, find_adapter("sft").head).architectures == ["MambaForCausalLM"]
    with pytest.raises(InputError, match="no AutoModelForSequenceClassification for models of type mamba"):
        load_config(source, HEAD)


def test_a_reward_model_can_be_trained_on_and_is_no_language_model(tmp_path: Path) -> None:
    HEAD.configured(small_config(), "small").save_pretrained(tmp_path)
    source = ModelSource(str(tmp_path))
    assert load_config(source, HEAD).architectures == ["LlamaForSequenceClassification"]
    with pytest.raises(InputError, match="is not a causal language model"):
        load_config(source, find_adapter("sft").head)


def test_attention_is_checked_on_the_class_that_is_trained_and_packing_is_none_of_its_business(
    small_model_directory: Path, tmp_path: Path
) -> None:
    source, attentions = ModelSource(str(small_model_directory)), ("sdpa", "unheard_of")
    request = CheckPackingRequest("reward", source, "cpu", attentions, packs=False)
    sdpa, unheard_of = check_packing(request, JobContext(tmp_path, time.monotonic()))
    assert (sdpa.supported, sdpa.separates) == (True, False)
    assert not unheard_of.supported


def test_its_tokenizer_is_loaded_as_trl_loads_it(small_model_directory: Path) -> None:
    known = find_adapter("reward")
    processor = load_processor(ModelSource(str(small_model_directory)), known.processor)
    assert processor.pad_token == small_tokenizer().pad_token


def test_margins_go_with_the_rows_into_the_loss(small_model_directory: Path, tmp_path: Path) -> None:
    rows = [{**row, "margin": index / 10} for index, row in enumerate(pair_rows())]
    _, trainer = trained(request_of(prepared_rows(REWARD, rows, small_model_directory, tmp_path)), tmp_path)
    assert "margin" in trainer.train_dataset.column_names
    batch = next(iter(trainer.get_train_dataloader()))
    assert batch["margin"].shape == (2,)


def test_with_adapters_the_head_is_trained_and_has_none(pairs: Prepared, tmp_path: Path) -> None:
    request = request_of(pairs, ADAPTERS)
    rows = Dataset.from_dict({"chosen_ids": [[5, 6]], "rejected_ids": [[7]]})
    model = build_trainer(request, rows, tmp_path, Progress(SCHEDULE, CpuMeter())).model
    of_head = {name: parameter.requires_grad for name, parameter in model.named_parameters() if "score" in name}
    assert of_head == {
        "base_model.model.score.original_module.weight": False,
        "base_model.model.score.modules_to_save.default.weight": True,
    }


def test_a_margin_must_be_given_in_every_row(small_model_directory: Path, tmp_path: Path) -> None:
    first, second, *_ = pair_rows()
    with pytest.raises(InputError, match=r"rows\.jsonl has no margin in 1 of 2 rows, the first of which is row 2"):
        prepared_rows(REWARD, [{**first, "margin": 0.1}, second], small_model_directory, tmp_path)


def test_a_probe_of_rows_that_are_all_dropped_ends_with_the_reason(pairs: Prepared, tmp_path: Path) -> None:
    shown = probed_here(request_of(pairs, max_length=2), tmp_path)
    assert shown.status is not ProbeStatus.OK
    assert "the trainer drops every row of the dataset" in shown.reason
