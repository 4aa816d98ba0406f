"""A check reports arguments that TRL's classes accept, but that make training fail."""

from __future__ import annotations

import pytest
from datasets import Dataset
from transformers import BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

from autotune.core.documents.verdict import Outcome, Severity
from tests.app.check.configurations import FITS
from tests.app.check.conftest import Checked, Write
from tests.step.plans import needs_deepspeed

EVALUATED = "eval_strategy: epoch\ntest_split_size: 0.2\n"
GROUPS = "per_device_eval_batch_size: 4\n"
DRAWN = "log_completions: true\ntop_entropy_quantile: 0.5\ngeneration_kwargs: {top_k: 20, do_sample: true}\n"
DEEPSPEED = "num_processes: 2\ndeepspeed: {bf16: {enabled: auto}, train_batch_size: auto, "
NO_MOMENTUM = "adam_beta1: 0.0\nfull_determinism: true\ndataloader_num_workers: 2\nsave_only_model: true\n"
FEW_STEPS = "warmup_steps: 1000\nlr_scheduler_type: cosine\nnum_train_epochs: 0.5\nlogging_steps: 0.5\n"
DROPS_LAST = "dataloader_drop_last: true\n"
OFFLOADED = "gradient_checkpointing_kwargs: {offload: true}\n"
FEW_TRAINED = "eval_strategy: epoch\ntest_split_size: 36\nper_device_train_batch_size: 2\n"


def test_a_key_that_trl_refuses_is_told_beside_one_that_it_lacks(write: Write, checked: Checked) -> None:
    file = write("grpo", "per_device_train_batch_size: 6\nmax_lenght: 64\n")
    verdict = checked(config=str(file), trainer="grpo", fits=False)
    wrong = [item for item in verdict.findings if item.severity is Severity.ERROR]
    assert [item.line for item in wrong] == [9, 12]
    assert "must be divisible by num_generations" in wrong[0].message
    assert "max_lenght is not a key of grpo" in wrong[1].message


@pytest.mark.parametrize(
    ("trainer", "body", "words"),
    [
        (
            "sft",
            "adam_beta1: 2.0\n",
            "adam_beta1 makes training fail: ValueError: Invalid beta parameter at index 0: 2.0",
        ),
        pytest.param("kto", "adam_epsilon: -1.0e-8\n", "Invalid epsilon value", marks=pytest.mark.nightly),
        ("sft", "optim: adamw_torch\nlearning_rate: .nan\n", "Invalid learning rate: nan"),
        pytest.param("sft", "seed: null\n", "seed makes training fail: TypeError", marks=pytest.mark.nightly),
        ("sft", "per_device_train_batch_size: null\n", "per_device_train_batch_size makes training fail"),
        pytest.param("sft", "max_steps: null\n", "max_steps makes training fail: TypeError", marks=pytest.mark.nightly),
        pytest.param(
            "grpo", "num_iterations: null\n", "num_iterations makes training fail: TypeError", marks=pytest.mark.nightly
        ),
        ("sft", f"{EVALUATED}per_device_eval_batch_size: null\n", "per_device_eval_batch_size makes training fail"),
        ("sft", "num_train_epochs: .inf\n", "num_train_epochs makes training fail: OverflowError"),
        (
            "sft",
            "dataloader_num_workers: 2\ndataloader_prefetch_factor: 0\n",
            "dataloader_prefetch_factor makes training fail",
        ),
        (
            "sft",
            "env:\n  PYTORCH_CUDA_ALLOC_CONF: max_split_size:128\n",
            "the caching allocator's settings 'max_split_size:128': ",
        ),
        (
            "sft",
            "env:\n  PYTORCH_CUDA_ALLOC_CONF: expandable_segments:true\n",
            "PyTorch cannot read the caching allocator's settings 'expandable_segments:true': Expected 'True'",
        ),
        pytest.param(
            "sft",
            "env:\n  PYTORCH_ALLOC_CONF: expandable_segments=True\n",
            "Write NAME:VALUE with commas between, and True or False.",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "sft",
            f"{DEEPSPEED}sparse_gradients: true, zero_optimization: {{stage: 1}}}}\n",
            "DeepSpeed refuses its document. DeepSpeedConfigError: Sparse",
            marks=needs_deepspeed,
        ),
        pytest.param(
            "sft",
            f"{DEEPSPEED}zero_optimization: {{stage: 1, no_such: 1}}}}\n",
            "DeepSpeed refuses its document. validation error for DeepSpeedZeroConfig no_such",
            marks=[pytest.mark.nightly, needs_deepspeed],
        ),
        (
            "sft",
            "num_processes: 2\nfsdp: true\nfsdp_config: {auto_wrap_policy: SIZE_BASED_WRAP, min_num_params: 1000}\n",
            "FSDP2 cannot wrap layers by SIZE_BASED_WRAP",
        ),
        ("sft", "model_init_kwargs: 'x'\n", "model_init_kwargs is text, and TRL needs a mapping"),
        pytest.param(
            "sft",
            "gradient_checkpointing_kwargs: {no_such: 1}\n",
            "makes training fail: ValueError: Unexpected keyword arguments: no_such",
            marks=pytest.mark.nightly,
        ),
        ("sft", "seed: -1\n", "seed makes training fail: ValueError: Seed must be between 0 and 2**32 - 1"),
        (
            "grpo",
            "top_entropy_quantile: -1.0\n",
            "top_entropy_quantile makes training fail: RuntimeError: quantile()",
        ),
        pytest.param(
            "grpo",
            f"{EVALUATED}{GROUPS}include_for_metrics: [inputs]\n",
            "include_for_metrics makes training fail",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "grpo",
            f"{EVALUATED}{GROUPS}metric_for_best_model: nope\n",
            "metric_for_best_model makes training fail",
            marks=pytest.mark.nightly,
        ),
        ("rloo", "accelerator_config: {dispatch_batches: true}\n", "tensors but got"),
        ("online_dpo", "remove_unused_columns: true\n", "makes training fail: ValueError: No columns in the dataset"),
        ("online_dpo", "beta: [0.1, 0.2]\n", "beta makes training fail: TypeError: list indices must be integers"),
        (
            "grpo",
            "use_vllm: true\nvllm_mode: colocated\n",
            "TRL has no vllm_mode=colocated: it takes colocate or server",
        ),
        (
            "grpo",
            "use_vllm: true\nvllm_importance_sampling_mode: token\n",
            "vllm_importance_sampling_mode: the first step fails. Unknown vLLM importance sampling level: token",
        ),
    ],
)
def test_what_ends_a_training_is_no_fit(trainer: str, body: str, words: str, write: Write, checked: Checked) -> None:
    file = write(trainer, body)
    file.write_text(file.read_text().replace("seed: 7\n", ""))
    verdict = checked(config=str(file), trainer=trainer, gpu="H100-80GB")
    assert verdict.outcome is Outcome.CANNOT_RUN
    (found,) = (item for item in verdict.findings if item.severity is Severity.ERROR)
    assert words in found.message


def test_a_model_that_two_keys_quantise_is_refused_as_trl_refuses_it(write: Write, checked: Checked) -> None:
    given = {"quantization_config": {"load_in_4bit": True}}
    args = SFTConfig("out", use_cpu=True, bf16=False, report_to="none", model_init_kwargs=given)
    rows = Dataset.from_dict({"text": ["a"]})
    with pytest.raises(ValueError, match="both as a trainer argument"):
        SFTTrainer("m", args, train_dataset=rows, quantization_config=BitsAndBytesConfig(load_in_4bit=True))
    for further, refused in (("", False), ("load_in_4bit: true\n", True)):
        file = write("sft", f"model_init_kwargs: {given}\n{further}")
        verdict = checked(config=str(file), trainer="sft", fits=False)
        assert (verdict.outcome is Outcome.CANNOT_RUN) is refused
        said = "TRL refuses quantization_config in model_init_kwargs beside load_in_4bit: true"
        assert any(said in item.message for item in verdict.findings) is refused


@pytest.mark.parametrize(
    ("trainer", "body"),
    [
        ("sft", f"{NO_MOMENTUM}{FEW_STEPS}"),
        ("dpo", f"{EVALUATED}lr_scheduler_type: reduce_lr_on_plateau\neval_accumulation_steps: 1\n"),
        pytest.param(
            "grpo",
            f"{EVALUATED}{GROUPS}{DRAWN}metric_for_best_model: reward\nremove_unused_columns: true\n",
            marks=pytest.mark.nightly,
        ),
        ("kto", "accelerator_config: {dispatch_batches: true}\nauto_find_batch_size: true\n"),
        # Norms are logged without a limit.
        pytest.param("online_dpo", "beta: [0.1]\nmax_grad_norm: .inf\n", marks=pytest.mark.nightly),
        # PyTorch checks the default of its optimizers, and transformers gives the value to groups of parameters.
        pytest.param("sft", "weight_decay: -1.0\n", marks=pytest.mark.nightly),
        pytest.param("sft", "optim: sgd\nadam_beta1: 2.0\n", marks=pytest.mark.nightly),
        pytest.param(
            "sft", "env:\n  PYTORCH_ALLOC_CONF: 'backend:native, max_split_size_mb:128'\n", marks=pytest.mark.nightly
        ),
        pytest.param("sft", "max_steps: 3\nnum_train_epochs: .inf\n", marks=pytest.mark.nightly),
        pytest.param("sft", "model_init_kwargs: '{\"use_cache\": false}'\n", marks=pytest.mark.nightly),
        # The tiny training is on a CPU, and its rows fill no micro-batches, which these do.
        ("sft", f"packing: true\nmax_length: 64\nper_device_train_batch_size: 2\n{DROPS_LAST}{OFFLOADED}"),
        pytest.param(
            "sft",
            f"{FEW_TRAINED}per_device_eval_batch_size: 32\nmetric_for_best_model: loss\n{DROPS_LAST}",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_arguments_with_which_trl_trains_fit(trainer: str, body: str, write: Write, checked: Checked) -> None:
    verdict = checked(config=str(write(trainer, body)), trainer=trainer, gpu="H100-80GB")
    assert verdict.outcome is FITS, [item.message for item in verdict.findings]


def test_a_training_that_does_not_end_is_ended_and_proves_nothing(
    write: Write, checked: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.app.check.fitting._BUILDING_SECONDS", 0.0)
    # No verdict of another test is that of this file.
    verdict = checked(config=str(write("sft", "learning_rate: 1.25e-04\n")), trainer="sft", gpu="H100-80GB")
    assert verdict.outcome is Outcome.UNKNOWN
    assert "exceeded its time limit" in verdict.reason


@pytest.mark.parametrize(
    ("body", "of"),
    [
        ("per_device_train_batch_size: 1000000000\n", "1,000,000,000 rows of up to 59 tokens"),
        ("packing: true\nmax_length: 10000000\n", "8 rows of up to 10,000,000 tokens"),
    ],
)
def test_a_micro_batch_of_too_many_tokens_is_not_traced(body: str, of: str, write: Write, checked: Checked) -> None:
    verdict = checked(config=str(write("sft", body)), trainer="sft", gpu="H100-80GB")
    assert verdict.outcome is Outcome.UNKNOWN
    assert verdict.reason.startswith(f"A micro-batch of {of} is too large to trace: the limit is 16,777,216 tokens")
