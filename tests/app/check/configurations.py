"""YAML configurations of every trainer (valid, legacy and broken) with their expected verdicts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autotune.core.documents.verdict import Outcome
from tests.app.check.beginning import HEAD, SHORT


@dataclass(frozen=True)
class Case:
    """A configuration, and the expected verdict of a check.

    Attributes:
        body: its lines, below :data:`HEAD`.
        says: parts of messages, each with the line of its key; None where the key is in no line.
        remedy: keys that the smallest change that fits sets.
        nightly: whether faster cases show the same kind of verdict, for another trainer or another key.
    """

    name: str
    trainer: str
    body: str
    outcome: Outcome
    says: Mapping[str, int | None] = field(default_factory=dict)
    gpu: str | None = "H100-80GB"
    memory_budget: str | None = None
    remedy: frozenset[str] = frozenset()
    nightly: bool = False

    @property
    def first(self) -> int:
        """The line of the first key of the body."""
        return HEAD.count("\n") + SHORT.get(self.trainer, "").count("\n") + 1


def _case(name: str, body: str, outcome: Outcome, says: Mapping[str, int | None] | None = None, **more: object) -> Case:
    trainer = name.split(":", maxsplit=1)[0]
    return Case(name, trainer, body, outcome, says or {}, **more)  # type: ignore[arg-type]  # fields by name


def _night(
    name: str, body: str, outcome: Outcome, says: Mapping[str, int | None] | None = None, **more: object
) -> Case:
    return _case(name, body, outcome, says, **more, nightly=True)


# Of the four completions of a prompt, a micro-batch has two.
HALF_A_GROUP = "per_device_train_batch_size: 2\ngradient_accumulation_steps: 1\n"
ADAPTERS = "use_peft: true\nlora_target_modules: all-linear\ndtype: bfloat16\n"
BEST = "eval_strategy: epoch\ntest_split_size: 0.2\nload_best_model_at_end: true\nsave_strategy: epoch\n"
SERVED = "use_vllm: true\nvllm_mode: server\n"
FITS, NOT, RUNS_NOT = Outcome.FITS, Outcome.DOES_NOT_FIT, Outcome.CANNOT_RUN
UNKNOWN = Outcome.UNKNOWN

CASES = (
    # Lines count from the first one of the body; those of SHORT are before it.
    _case("sft: as TRL has it", "", FITS, {"An optimizer step trains on 8 documents": None}),
    # PEFT takes text for modules: this word, or a regular expression.
    _night("sft: modules as text", "use_peft: true\nlora_target_modules: all-linear\n", FITS),
    # The loss of answers in rows without any, a checkpoint and a tracker that are not here, and no cache.
    _case(
        "sft: keys that change nothing here",
        "auto_find_batch_size: true\ncompletion_only_loss: true\nresume_from_checkpoint: true\n"
        "report_to: [comet_ml]\nmodel_init_kwargs: {use_cache: false}\n",
        FITS,
        {
            "global batch 10 % smaller": 0,
            "has no effect on": 1,
            "without a checkpoint in out": 2,
            "names comet_ml: TRL refuses that": 3,
        },
    ),
    _case(
        "sft: a key twice",
        "max_length: 64\nmax_length: 32\n",
        FITS,
        {"max_length is there twice: line 8 has it too, and has no effect": 1, "max_length=32 cuts": 1},
    ),
    _night(
        "sft: packed",
        "packing: true\nmax_length: 64\nper_device_train_batch_size: 2\n",
        FITS,
        {"An optimizer step trains on": None},
    ),
    _case(
        "sft: wrapped",
        "packing: true\npacking_strategy: wrapped\nmax_length: 64\n",
        FITS,
        {"documents attend to their neighbours": 0},
    ),
    _night(
        "sft: FSDP2 of TRL's own",
        "accelerate_config: fsdp2\n",
        FITS,
        {"fsdp_cpu_ram_efficient_loading saves no host memory": None},
    ),
    _case(
        "sft: legacy",
        "max_seq_length: 64\npacking: true\npacking_strategy: ffd\ntorch_dtype: bfloat16\n",
        RUNS_NOT,
        {"write max_length: 64": 0, "write packing_strategy: bfd": 2, "write dtype: bfloat16": 3},
    ),
    _case(
        "sft: misspelt",
        "per_device_train_batch_sise: 4\nbeta: 0.1\nlearning_rate: fast\nnum_train_epochs: [3]\n"
        "per_device_batch_size: 4\n",
        RUNS_NOT,
        {
            "Did you mean per_device_train_batch_size?": 0,
            "beta is a key of distillation, dpo, grpo, kto": 1,
            'learning_rate is "fast", and takes a number': 2,
            "num_train_epochs is [3], and takes a number": 3,
            "Did you mean per_device_eval_batch_size or per_device_train_batch_size?": 4,
        },
    ),
    _case("sft: padding-free with a length", "padding_free: true\n", RUNS_NOT, {"is not enforced": 0}),
    _night("sft: half precision", "dtype: bfloat16\n", FITS, {"without a copy in float32": 0}),
    _night(
        "sft: evaluated on a part of its rows",
        "eval_strategy: epoch\ntest_split_size: 0.2\nper_device_eval_batch_size: 32\n",
        FITS,
    ),
    _case(
        "sft: the best by a metric that evaluation lacks",
        f"{BEST}metric_for_best_model: accuracy\n",
        RUNS_NOT,
        {"metric_for_best_model makes training fail: KeyError": 4},
    ),
    _case("sft: the best by a metric of TRL's", f"{BEST}metric_for_best_model: eval_mean_token_accuracy\n", FITS),
    _night("dpo: the best by its rows", f"{BEST}metric_for_best_model: rewards/accuracies\n", FITS),
    _night("reward: the best by its accuracy", f"{BEST}metric_for_best_model: accuracy\n", FITS),
    _case(
        "sft: no without quotes",
        "eval_strategy: no\n",
        RUNS_NOT,
        {"eval_strategy is false, and takes no, steps, epoch. YAML reads no without quotes as false: write 'no'": 0},
    ),
    _case("sft: evaluated on no rows", "eval_strategy: epoch\n", RUNS_NOT, {"TRL fails with a KeyError": -5}),
    _night("sft: padding-free without a length", "padding_free: true\nmax_length: null\n", FITS),
    _case("sft: a package that is not here", "optim: galore_adamw\noptim_target_modules: [q_proj]\n", UNKNOWN),
    _night("sft: four processes", "num_processes: 4\n", FITS, {"(8 rows x 4 processes)": None}),
    _case(
        "sft: a number that YAML takes for text",
        "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr: 1e-6}\n",
        RUNS_NOT,
        {"lr_scheduler_kwargs makes training fail: TypeError": 1, "write 1.0e-6": 1},
    ),
    _night(
        "sft: a scheduler without its number", "lr_scheduler_type: cosine_with_min_lr\n", RUNS_NOT, {"One of min_lr": 0}
    ),
    _night(
        "sft: a scheduler that can be made",
        "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr: 1.0e-6}\n",
        FITS,
    ),
    _night("sft: an optimizer that is not here", "optim: schedule_free_adamw\n", UNKNOWN, {"TRL refuses optim=": 0}),
    # Text and YAML's own null alike are no tracker.
    _case("sft: a tracker that is none", "report_to: None\n", RUNS_NOT, {"Write report_to: none": 0}),
    _case(
        "sft: workers that are kept, and are none",
        "dataloader_persistent_workers: true\n",
        RUNS_NOT,
        {"needs num_workers > 0": 0},
    ),
    _case(
        "sft: no rows and no micro-batches",
        "per_device_train_batch_size: 0\ngradient_accumulation_steps: 0\n",
        RUNS_NOT,
        {"per_device_train_batch_size makes training fail": 0, "gradient_accumulation_steps makes training fail": 1},
    ),
    # TRL trains on rows without their last token.
    _night("sft: a length below zero", "max_length: -1\n", UNKNOWN),
    _case("sft: micro-batches below zero", "gradient_accumulation_steps: -1\n", UNKNOWN),
    _night(
        "sft: predictions that are kept for no micro-batch",
        "eval_strategy: epoch\ntest_split_size: 0.2\neval_accumulation_steps: 0\n",
        RUNS_NOT,
        {"eval_accumulation_steps makes training fail": 2},
    ),
    _night("sft: no rows of an evaluation that there is not", "per_device_eval_batch_size: 0\n", FITS),
    _case(
        "sft: fewer rows than a micro-batch",
        "per_device_train_batch_size: 64\ndataloader_drop_last: true\n",
        RUNS_NOT,
        {"drops all 48 rows of an epoch: a micro-batch of all processes has 64": 1},
    ),
    _case("sft: no step", "max_steps: 0\n", FITS, {"training stops after the first step": 0}),
    _night("sft: no epoch", "num_train_epochs: 0\n", FITS, {"training stops before the first step": 0}),
    _night(
        "sft: fewer epochs than none", "num_train_epochs: -1\n", FITS, {"num_train_epochs is -1: training stops": 0}
    ),
    _case("sft: the best by nothing", "save_strategy: best\n", RUNS_NOT, {"must be provided when using 'best'": 0}),
    _case(
        "sft: evaluated on no rows at first",
        "eval_on_start: true\n",
        RUNS_NOT,
        {"evaluation requires an eval_dataset": 0},
    ),
    _night("sft: compiled", "torch_compile: true\n", FITS, {"a compiled step needs what": None}),
    _case(
        "sft: a mode of compilation that is none",
        "torch_compile_mode: max_autotune\n",
        RUNS_NOT,
        {"should be one of: default": 0},
    ),
    _case(
        "sft: gradients that no scaler takes",
        "fp16: true\ndtype: float16\n",
        RUNS_NOT,
        {"Attempting to unscale FP16 gradients": 0},
    ),
    _case(
        "sft: adapters in bfloat16, and fp16",
        "fp16: true\nuse_peft: true\nload_in_4bit: true\n",
        RUNS_NOT,
        {"CUDA does not scale gradients in bfloat16": 0},
        gpu="T4",
    ),
    # PyTorch computes bfloat16 there in float32, and so transformers takes it.
    _case(
        "sft: bfloat16 on a GPU without it", "bf16: true\n", FITS, {"PyTorch computes it in float32": None}, gpu="T4"
    ),
    _case(
        "sft: FlashAttention on a GPU that is too old for it",
        "fp16: true\nattn_implementation: flash_attention_2\n",
        RUNS_NOT,
        {"needs a GPU of compute capability 8.0 or later": None},
        gpu="T4",
    ),
    _night(
        "sft: weights in bfloat16, and fp16",
        "fp16: true\ndtype: bfloat16\n",
        RUNS_NOT,
        {"CUDA does not scale gradients in bfloat16": 0, "those of dtype: bfloat16": 0},
    ),
    _case("sft: micro-batches that are divided", "accelerator_config: {split_batches: true}\n", UNKNOWN),
    _night("dpo: as TRL has it", "", FITS, {"An optimizer step trains on 8 documents": None}),
    _case(
        "dpo: legacy",
        "max_prompt_length: 64\npadding_free: true\nrpo_alpha: 0.5\n",
        RUNS_NOT,
        {"max_prompt_length was removed in TRL 0.29.0": 0, "padding_free": 1, "rpo_alpha was removed in TRL 0.29.0": 2},
    ),
    _case("dpo: a loss that was removed", "loss_type: kto_pair\n", RUNS_NOT, {"kto_pair": 0}),
    _case(
        "dpo: the beginning is cut",
        "max_length: 32\ntruncation_mode: keep_end\n",
        FITS,
        {"max_length=32 cuts": 0, "An optimizer step trains on 8 documents": None},
    ),
    _case(
        "dpo: grouped by a length that its rows lack",
        "train_sampling_strategy: group_by_length\n",
        RUNS_NOT,
        {"Can only automatically infer lengths": 0},
    ),
    _night("dpo: a loss of another trainer", "loss_type: simpo\n", RUNS_NOT, {"experimental CPO": 0}),
    _night(
        "dpo: synchronised at no step",
        "sync_ref_model: true\nref_model_sync_steps: 0\n",
        RUNS_NOT,
        {"ref_model_sync_steps makes training fail": 1},
    ),
    _night("dpo: no divergence", "f_divergence_type: nope\n", RUNS_NOT, {"f_divergence_type makes training fail": 0}),
    _night("dpo: cut in the middle", "truncation_mode: middle\n", RUNS_NOT, {"truncation_mode": 0}),
    _case("dpo: no loss", "loss_type: sigmoids\n", RUNS_NOT, {"Unknown loss type: sigmoids": 0}),
    _night("dpo: too little memory", "", NOT, {}, gpu="24GiB", memory_budget="400MiB"),
    _night("kto: evaluated row by row", f"{BEST}per_device_eval_batch_size: 1\n", FITS),
    _night("kto: as TRL has it", "", FITS, {"An optimizer step trains on 8 documents": None}),
    _case("kto: in any order", "train_sampling_strategy: random\n", RUNS_NOT, {"train_sampling_strategy makes": 0}),
    _night(
        "kto: in any order without a KL divergence",
        "train_sampling_strategy: random\nloss_type: apo_zero_unpaired\n",
        UNKNOWN,
    ),
    _case("kto: one row", "per_device_train_batch_size: 1\n", RUNS_NOT, {"batch size must be > 1": 0}),
    _night(
        "kto: one row without a KL divergence", "per_device_train_batch_size: 1\nloss_type: apo_zero_unpaired\n", FITS
    ),
    _case(
        "kto: a key of DPO",
        "precompute_ref_batch_size: 4\nf_divergence_type: reverse_kl\n",
        RUNS_NOT,
        {"is a key of dpo": 1},
    ),
    _night("kto: legacy", "max_completion_length: 64\nmax_prompt_length: 64\n", RUNS_NOT, {"removed in TRL 0.27.0": 0}),
    _night("reward: as TRL has it", "", FITS, {"An optimizer step trains on 8 documents": None}),
    _case(
        "reward: adapters of a model that generates",
        "use_peft: true\n",
        RUNS_NOT,
        {"write lora_task_type: SEQ_CLS": None},
    ),
    _night("reward: adapters", "use_peft: true\nlora_task_type: SEQ_CLS\n", FITS),
    _night(
        "reward: fused loss of a language model",
        "use_liger_kernel: true\n",
        RUNS_NOT,
        {"write liger_kernel_config: {fused_linear_cross_entropy: false}": None},
    ),
    _night(
        "reward: Liger without its loss",
        "use_liger_kernel: true\nliger_kernel_config: {fused_linear_cross_entropy: false}\n",
        FITS,
    ),
    _case(
        "reward: rows dropped",
        "max_length: 40\n",
        FITS,
        {"max_length=40 drops": 0, "An optimizer step trains on 8 documents": None},
    ),
    _case("reward: all rows dropped", "max_length: 2\n", RUNS_NOT, {"leaves none of the 48 rows": 0}),
    _night(
        "reward: a wrong type",
        "max_length: long\ncenter_rewards_coefficient: none\n",
        RUNS_NOT,
        {'max_length is "long"': 0},
    ),
    _night("grpo: as TRL has it", "", FITS, {"trains on 8 completions": None, "has a placeholder reward, ": -1}),
    _case(
        "grpo: groups that do not divide",
        "per_device_train_batch_size: 6\n",
        RUNS_NOT,
        {"must be divisible by": -2, "`accelerate launch -m trl.scripts.grpo --config FILE` counts all of them": -2},
    ),
    _case(
        "grpo: no rows, and trained on no time",
        "per_device_train_batch_size: 0\nnum_iterations: 0\n",
        RUNS_NOT,
        {"per_device_train_batch_size makes": 0, "num_iterations makes": 1},
    ),
    _night("grpo: rewards scaled by nothing", "scale_rewards: none_\n", RUNS_NOT, {"scale_rewards makes": 0}),
    _night("grpo: no clipping by null", "max_grad_norm: null\n", RUNS_NOT, {"max_grad_norm makes training fail": 0}),
    _night("grpo: no temperature", "temperature: 0.0\n", RUNS_NOT, {"temperature makes": 0}),
    _night("grpo: no number of tokens", "top_k: -1\n", RUNS_NOT, {"top_k makes training fail": 0}),
    _night("grpo: no share", "min_p: 2.0\n", RUNS_NOT, {"min_p makes training fail": 0}),
    _night("grpo: no penalty", "repetition_penalty: 0.0\n", RUNS_NOT, {"`penalty` has to be": 0}),
    _case("grpo: a length of generations", "generation_kwargs: {max_new_tokens: 8}\n", UNKNOWN),
    _case("grpo: no loss", "loss_type: gspo\n", RUNS_NOT, {"write loss_type: grpo, importance_sampling_level": 0}),
    _night("grpo: a generation for two steps", f"{HALF_A_GROUP}steps_per_generation: 2\n", FITS),
    _night("grpo: a generation of eight rows", f"{HALF_A_GROUP}generation_batch_size: 8\n", FITS),
    _night(
        "grpo: evaluated in groups of their own",
        "eval_strategy: epoch\ntest_split_size: 0.2\nper_device_eval_batch_size: 2\nnum_generations_eval: 2\n",
        FITS,
    ),
    _case("grpo: a key that no release had", "vllm_sleep_enabled: true\n", RUNS_NOT, {"vllm_enable_sleep_mode": 0}),
    _night("grpo: legacy", "max_prompt_length: 512\nuse_liger_loss: true\n", RUNS_NOT, {"Prompts are never cut": 0}),
    _case(
        "grpo: 4 bits for a server", f"{ADAPTERS}load_in_4bit: true\n{SERVED}", RUNS_NOT, {"packed weights of": None}
    ),
    _case("grpo: 8 bits with vLLM", f"{ADAPTERS}load_in_8bit: true\nuse_vllm: true\n", RUNS_NOT, {"8 bits": None}),
    _case("grpo: vLLM on more GPUs", "use_vllm: true\nvllm_tensor_parallel_size: 2\n", RUNS_NOT, {"divides the 1": 1}),
    _night("grpo: a server on more GPUs", f"{SERVED}vllm_tensor_parallel_size: 3\n", FITS),
    _case("grpo: vLLM beyond the model", "use_vllm: true\nvllm_max_model_length: 9999\n", RUNS_NOT, {"9,999": 1}),
    _case("grpo: vLLM below prompts", "use_vllm: true\nvllm_max_model_length: 20\n", RUNS_NOT, {"takes only 20": 1}),
    _case(
        "grpo: the likeliest tokens",
        "generation_kwargs: {do_sample: false}\n",
        FITS,
        {"a sampled token": None, "trains on 8 completions": None, "has a placeholder reward, ": -1},
    ),
    _night("rloo: as TRL has it", "", FITS, {"An optimizer step trains on 8 completions": None}),
    _case("rloo: of another algorithm", "rloo_k: 4\nkl_coef: 0.1\nnum_mini_batches: 2\n", RUNS_NOT, {"kl_coef": 1}),
    _night("rloo: a list as text", "reward_weights: one\n", RUNS_NOT, {'reward_weights is "one"': 0}),
    _night("rloo: too few prompts", "gradient_accumulation_steps: 64\n", RUNS_NOT, {"the dataset has 48": None}),
    _case("rloo: quantised by a text", "model_init_kwargs: {quantization_config: x}\n", Outcome.UNKNOWN),
    _night("online_dpo: as TRL has it", "", FITS, {"trains on 8": None, "has a placeholder reward, ": -1}),
    _night("online_dpo: of GRPO", "max_completion_length: 24\n", RUNS_NOT, {"is a key of distillation, grpo, rloo": 0}),
    _night("online_dpo: misspelt", "max_new_token: 24\n", RUNS_NOT, {"Did you mean max_new_tokens?": 0}),
    _night("online_dpo: no room for prompts", "max_length: 16\n", FITS, {"without their prompts": -2}),
    _night("distillation: as TRL has it", "", FITS, {"An optimizer step trains on 8 prompts": None}),
    _case(
        "distillation: with vLLM",
        "use_vllm: true\n",
        FITS,
        {"cannot be built: ImportError": 0, "An optimizer step trains on 8 prompts": None},
    ),
    _night("distillation: of GRPO", "num_generations: 4\n", RUNS_NOT, {"is a key of grpo, rloo": 0}),
    _night(
        "distillation: misspelt", "max_completion_lenght: 24\n", RUNS_NOT, {"Did you mean max_completion_length?": 0}
    ),
    _night(
        "distillation: a teacher that is quantised by what is not known",
        "teacher_model_init_kwargs: {quantization_config: {quant_method: gptq}}\n",
        Outcome.UNKNOWN,
    ),
)
