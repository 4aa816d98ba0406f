"""The callback stops a real trainer before its first step, or lets it train."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from torch._subclasses import FakeTensorMode
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerControl,
    TrainerState,
)
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

import autotune
from autotune.api import preflight
from autotune.api.running import available_bytes
from autotune.app.arguments import CheckArguments
from autotune.core.documents.verdict import Outcome, Verdict, WillNotFit
from autotune.errors import InputError
from autotune.units import GIB
from autotune.userconfig.objects import configuration_of
from tests.app.check.conftest import cache_of
from tests.small import messages_rows, small_config, write_rows
from tests.step.test_reading import MARKED

CLASSES: dict[str, tuple[Any, Any, dict[str, object]]] = {
    "sft": (SFTTrainer, SFTConfig, {"max_length": 32}),
    "dpo": (DPOTrainer, DPOConfig, {"max_length": 32}),
    "kto": (KTOTrainer, KTOConfig, {}),
    "reward": (RewardTrainer, RewardConfig, {}),
    "grpo": (GRPOTrainer, GRPOConfig, {"num_generations": 4, "max_completion_length": 8}),
}


def built(trainer: str, model: Path, file: Path, folder: Path, budget: str = "4GiB", **more: Any) -> Any:
    kind, config, own = CLASSES[trainer]
    tokenizer = AutoTokenizer.from_pretrained(model)
    head = AutoModelForSequenceClassification if trainer == "reward" else AutoModelForCausalLM
    loaded = head.from_pretrained(model, **({"num_labels": 1} if trainer == "reward" else {}))
    if trainer == "reward":
        loaded.config.pad_token_id = tokenizer.pad_token_id
    plain = {"use_cpu": True, "bf16": False, "report_to": "none", "max_steps": 1}
    args = config(output_dir=str(folder), **{**plain, **own, **more.pop("options", {})})
    callback = more.pop("callback", None) or autotune.PreflightCallback(memory_budget=budget)
    if trainer == "grpo":
        more.setdefault("reward_funcs", lambda completions, **_: [0.0] * len(completions))
    return kind(
        model=more.pop("trained", loaded),
        args=args,
        processing_class=tokenizer,
        train_dataset=load_dataset("json", data_files=str(file), split="train"),
        callbacks=[callback],
        **more,
    )


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_of(tmp_path_factory)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "trainer",
    [pytest.param(name, marks=pytest.mark.nightly) if name != "sft" else name for name in CLASSES],
)
def test_what_will_not_fit_is_stopped_before_its_first_step(
    trainer: str, small_model_directory: Path, rows: Callable[[str], Path], tmp_path: Path
) -> None:
    training = built(trainer, small_model_directory, rows(trainer), tmp_path, "1MiB")
    with pytest.raises(WillNotFit, match=r"does not fit: .* of 1.00 MiB"):
        training.train()
    assert training.state.global_step == 0


@pytest.mark.slow
def test_what_adapts_its_micro_batches_is_not_stopped(
    small_model_directory: Path, rows: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"auto_find_batch_size": True}
    training = built("sft", small_model_directory, rows("sft"), tmp_path, "1MiB", options=options)
    with caplog.at_level(logging.WARNING):
        training.train()
    assert training.state.global_step == 1
    assert "does not fit" in caplog.text


@pytest.mark.slow
def test_a_reward_model_on_the_device_is_not_taken_for_memory_of_the_training(
    small_model_directory: Path, rows: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scoring = AutoModelForSequenceClassification.from_pretrained(small_model_directory, num_labels=1)
    training = built("grpo", small_model_directory, rows("grpo"), tmp_path, "4GiB", reward_funcs=scoring)
    with caplog.at_level(logging.INFO):
        training.train()
    assert training.state.global_step == 1
    assert "A reward model (LlamaForSequenceClassification) is on the device, which is not traced." in caplog.text
    assert "autotune: fits" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "adapter", "dtype"),
    [
        pytest.param({}, LoraConfig(r=4), "float32", id="beside an adapter"),
        pytest.param({"precompute_ref_log_probs": True}, None, "float32", id="kept though precomputed"),
        pytest.param({}, None, "bfloat16", id="of another type"),
    ],
)
def test_a_reference_that_no_trace_has_is_not_taken_for_memory_of_the_training(
    small_model_directory: Path,
    rows: Callable[[str], Path],
    tmp_path: Path,
    options: dict[str, object],
    adapter: LoraConfig | None,
    dtype: str,
) -> None:
    own = AutoModelForCausalLM.from_pretrained(small_model_directory, dtype=dtype)
    more = {"options": options, "peft_config": adapter, "ref_model": own}
    training = built("dpo", small_model_directory, rows("dpo"), tmp_path, "4GiB", **more)
    assert preflight._trainer_of(training.state) is training
    with pytest.raises(InputError, match=r"its own reference model \(LlamaForCausalLM\), which is not traced"):
        preflight._check_no_other_model(training, training.model, adapts=adapter is not None)


class OwnLoss(SFTTrainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "more", "evaluates", "own"),
    [
        (SFTTrainer, {"compute_metrics": len}, True, "compute_metrics"),
        (SFTTrainer, {"compute_metrics": len}, False, ""),
        (SFTTrainer, {"compute_loss_func": len}, False, "compute_loss_func"),
        (SFTTrainer, {"data_collator": list}, False, "data_collator"),
        (OwnLoss, {}, False, "compute_loss"),
        (SFTTrainer, {}, True, ""),
    ],
)
def test_a_step_that_is_not_trl_s_own_is_not_traced(
    kind: Any,
    more: dict[str, object],
    evaluates: bool,
    own: str,
    small_model_directory: Path,
    rows: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(CLASSES, "sft", (kind, *CLASSES["sft"][1:]))
    training = built("sft", small_model_directory, rows("sft"), tmp_path, "4GiB", **more)
    with pytest.raises(InputError, match=f"has its own {own}") if own else nullcontext():
        preflight._check_own_step(training, evaluates=evaluates)


@pytest.mark.slow
def test_a_copy_of_a_trained_adapter_as_the_reference_is_not_taken_for_memory_of_the_training(
    small_model_directory: Path, rows: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = AutoModelForCausalLM.from_pretrained(small_model_directory)
    lora = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    tuned = get_peft_model(base, lora)
    training = built("dpo", small_model_directory, rows("dpo"), tmp_path, "1MiB", trained=tuned)
    with caplog.at_level(logging.INFO):
        training.train()
    assert training.state.global_step == 1
    assert "The model has 2 adapters (default, ref), and one alone is traced." in caplog.text
    assert "autotune: " not in caplog.text


@pytest.mark.slow
def test_a_reference_that_is_a_copy_of_the_model_is_traced(
    small_model_directory: Path, rows: Callable[[str], Path], tmp_path: Path
) -> None:
    own = AutoModelForCausalLM.from_pretrained(small_model_directory)
    for more in ({}, {"ref_model": own}):
        training = built("dpo", small_model_directory, rows("dpo"), tmp_path, "4GiB", **more)
        assert training.ref_model is not None
        preflight._check_no_other_model(training, training.model, adapts=False)


@pytest.mark.slow
@pytest.mark.nightly
def test_a_training_that_is_evaluated_is_checked_and_trains(
    small_model_directory: Path, rows: Callable[[str], Path], tmp_path: Path
) -> None:
    evaluated = load_dataset("json", data_files=str(rows("sft")), split="train")
    options = {"eval_strategy": "steps", "eval_steps": 1}
    training = built(
        "sft", small_model_directory, rows("sft"), tmp_path, "4GiB", options=options, eval_dataset=evaluated
    )
    training.train()
    assert training.state.global_step == 1


@pytest.mark.slow
def test_the_labels_that_a_trainer_has_made_of_answers_are_those_of_its_check(
    small_model_directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "marked.jinja").write_text(MARKED)
    options = {"assistant_only_loss": True, "chat_template_path": str(tmp_path / "marked.jinja")}
    file = write_rows(tmp_path / "chats.jsonl", messages_rows(["a b c", "d"]))
    training = built("sft", small_model_directory, file, tmp_path / "out", "4GiB", options=options)
    with caplog.at_level(logging.INFO):
        training.train()
    assert "autotune: fits" in caplog.text


@pytest.mark.slow
def test_a_callback_of_several_trainers_checks_the_one_that_begins(
    small_model_directory: Path, rows: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def checked(_callback: object, _args: object, trainer: Any, *_: object) -> Verdict:
        return Verdict(Outcome.DOES_NOT_FIT, f"it is number {trainers.index(trainer)}")

    monkeypatch.setattr(autotune.PreflightCallback, "_verdict", checked)
    callback = autotune.PreflightCallback()
    trainers = [built("sft", small_model_directory, rows("sft"), tmp_path, callback=callback) for _ in range(2)]
    for number, training in enumerate(trainers):
        with pytest.raises(WillNotFit, match=f"number {number}"):
            training.train()


@pytest.mark.parametrize(
    ("gpu", "more", "available"),
    [("TITAN", {}, 10.5 * GIB), ("TITAN", {"use_vllm": True}, 14.5 * GIB), ("NVIDIA L4", {}, int(10.23 * GIB))],
)
def test_what_an_earlier_cell_of_a_notebook_left_on_a_gpu_is_not_available(
    gpu: str, more: dict[str, bool], available: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = {"mem_get_info": (4 * GIB, 24 * GIB), "memory_reserved": 10 * GIB, "memory_allocated": 8 * GIB}
    for name, figure in {**figures, "get_device_name": gpu}.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, figure=figure: figure)
    # Of 2 GiB, with as much of the optimizer's state.
    with FakeTensorMode():
        model = torch.nn.ParameterList([torch.empty(1024, 1024 * 512, device="cuda")])
        state = {model[0]: {"step": 1, "exp_avg": torch.empty_like(model[0])}}
    trainer = SimpleNamespace(
        model=model, model_wrapped=model, optimizer=SimpleNamespace(state=state), is_deepspeed_enabled=False
    )
    args = SimpleNamespace(device=torch.device("cuda"), world_size=1, **more)
    assert available_bytes(args, trainer) == available


def test_a_word_that_the_callback_does_not_have_is_refused_where_it_is_made() -> None:
    with pytest.raises(InputError, match=r"when_unsure cannot be 'stop'\. It is pass or fail"):
        autotune.PreflightCallback(when_unsure="stop")  # type: ignore[arg-type]
    budgets: dict[str | int, str] = {"24 gigs": "'24 gigs' is not", -5: "-5 is not a size", 24: "24 bytes is too small"}
    for budget, message in budgets.items():
        with pytest.raises(InputError, match=message):
            autotune.PreflightCallback(memory_budget=budget)


def begun(callback: autotune.PreflightCallback, **given: Any) -> None:
    """Begin a training on a CPU with a model, a tokenizer and rows."""
    device, evaluation = SimpleNamespace(type="cpu"), {"eval_strategy": "no", "eval_on_start": False}
    args = SimpleNamespace(process_index=0, world_size=1, device=device, **evaluation)
    callback.on_train_begin(args, TrainerState(), TrainerControl(), **given)


def test_where_no_file_can_be_written_training_goes_on_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full() -> None:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(preflight, "scratch_folder", full)
    given = {"model": SimpleNamespace(), "processing_class": object()}
    with caplog.at_level(logging.WARNING):
        begun(autotune.PreflightCallback(), **given)
    assert "No usable temporary directory found" in caplog.text
    with pytest.raises(InputError, match="No usable temporary directory found"):
        begun(autotune.PreflightCallback(when_unsure="fail"), **given)


def test_a_model_of_which_a_trace_shows_another_training_trains_with_a_warning(
    small_model_directory: Path, rows: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    def warned(model: Any) -> str:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            begun(autotune.PreflightCallback(dataset=rows("sft"), memory_budget="1MiB"), **given, model=model)
        return caplog.text

    given = {"processing_class": AutoTokenizer.from_pretrained(small_model_directory)}
    model = AutoModelForCausalLM.from_pretrained(small_model_directory)
    model.hf_device_map = {"model.embed_tokens": 0, "model.layers.0": 0, "lm_head": 1}
    assert "The model's layers are spread over 0, 1, which is not traced." in warned(model)
    model.hf_device_map = {"": 0}
    model.model.layers[0].requires_grad_(requires_grad=False)
    assert "Some of the model's weights are frozen, which is not traced." in warned(model)


@pytest.mark.parametrize("enabled", [True, False])
def test_layers_are_recomputed_in_a_check_as_the_model_was_told(small_model_directory: Path, enabled: bool) -> None:
    model = AutoModelForCausalLM.from_pretrained(small_model_directory)
    if enabled:
        model.gradient_checkpointing_enable()
    args = SFTConfig(use_cpu=True, bf16=False, report_to="none", gradient_checkpointing=not enabled)
    found = configuration_of(preflight._arguments(args, model, None))
    assert found.values["gradient_checkpointing"] is enabled


def test_experts_are_computed_in_a_check_as_in_the_model() -> None:
    model = AutoModelForCausalLM.from_config(small_config("qwen3_moe"), experts_implementation="batched_mm")
    loading = preflight._arguments(SFTConfig(use_cpu=True, bf16=False, report_to="none"), model, None).model_init_kwargs
    assert loading["experts_implementation"] == "batched_mm"


def test_an_adapter_that_transformers_has_added_is_checked_as_one(
    small_model_directory: Path, rows: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[CheckArguments] = []

    def checked(given: CheckArguments, *_: object, **__: object) -> Verdict:
        asked.append(given)
        return Verdict(Outcome.FITS, "fits", budget_bytes=0)

    monkeypatch.setattr(preflight, "check_object", checked)
    monkeypatch.setattr(preflight, "_arguments", lambda *_: SFTConfig)
    model = AutoModelForCausalLM.from_pretrained(small_model_directory)
    try:
        model.add_adapter(LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    except ValueError as error:  # Of transformers 5.24, which asks for PEFT 0.22.
        pytest.skip(str(error))
    tokenizer = AutoTokenizer.from_pretrained(small_model_directory)
    begun(autotune.PreflightCallback(dataset=rows("sft")), model=model, processing_class=tokenizer)
    assert asked[0].peft_config.r == 4
