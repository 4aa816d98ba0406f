"""Converts a user's existing trainer configuration into a training plan, and checks every field of it.

Its fields are of four kinds: those passed to the traced trainer unchanged; sizes, which the shape of a micro-batch
replaces; those without effect on memory and time of a step; and all others, which have to be at their defaults.
A field that a new release adds is of the last kind.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from autotune.core.plan import NO_EVALUATION, TrainingPlan
from autotune.errors import InputError
from autotune.trainers import Trainer, trainers
from autotune.trainers.base import EVALUATED

# Fields of transformers.TrainingArguments that change a step and that no technique writes.
_TRACED = frozenset({
    "label_smoothing_factor", "max_grad_norm", "neftune_noise_alpha", "optim_args",
    "optim_target_modules", "tf32", "use_cache",
})  # fmt: skip
# Optimizers' numbers, the source of rows, logging, saving, evaluation, the hub, and communication between processes.
# activation_checkpointing is gradient_checkpointing's new name, which mirrors it; fields about compilation do not
# matter, since a step is traced uncompiled.
_WITHOUT_EFFECT = frozenset({
    "accelerator_config", "activation_checkpointing", "activation_checkpointing_kwargs", "adam_beta1", "adam_beta2",
    "adam_epsilon", "auto_find_batch_size", "average_tokens_across_devices", "data_seed",
    "debug", "disable_tqdm", "do_eval", "do_predict",
    "do_train", "enable_jit_checkpoint", "full_determinism", "greater_is_better", "ignore_data_skip",
    "include_num_input_tokens_seen", "label_names", "learning_rate", "length_column_name", "load_best_model_at_end",
    "local_rank", "max_steps", "metric_for_best_model", "num_train_epochs", "output_dir",
    "project", "push_to_hub", "remove_unused_columns", "report_to",
    "restore_callback_states_from_checkpoint", "resume_from_checkpoint", "run_name", "seed",
    "skip_memory_metrics", "torch_compile_backend",
    "torch_compile_mode", "train_sampling_strategy", "use_cpu", "weight_decay",
})  # fmt: skip
_WITHOUT_EFFECT_BEGINNINGS = (
    "dataloader_", "ddp_", "eval_", "hub_", "log_", "logging_", "lr_scheduler_", "save_", "trackio_", "warmup_",
)  # fmt: skip
_WITHOUT_EFFECT_EVALUATION = frozenset({
    "batch_eval_metrics", "bf16_full_eval", "fp16_full_eval", "include_for_metrics", "per_device_eval_batch_size",
    "prediction_loss_only",
})  # fmt: skip
# Fields of peft.LoraConfig by what trl.ModelConfig calls them.
_LORA_WORDS = {
    "r": "lora_r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout", "target_modules": "lora_target_modules",
    "target_parameters": "lora_target_parameters", "modules_to_save": "lora_modules_to_save",
    "use_rslora": "use_rslora", "use_dora": "use_dora",
}  # fmt: skip
# How adapters are initialised and scaled, and where the base model came from.
_LORA_WITHOUT_EFFECT = frozenset({
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "fan_in_fan_out",
    "init_lora_weights", "loftq_config", "lora_ga_config", "megatron_core", "peft_type", "peft_version",
    "qalora_group_size", "revision", "runtime_config", "task_type",
})  # fmt: skip

_LOADING_WITHOUT_EFFECT = frozenset({
    "cache_dir", "device_map", "force_download", "local_files_only", "low_cpu_mem_usage", "revision", "subfolder",
    "token", "trust_remote_code", "use_safetensors",
})  # fmt: skip
_LOADING = frozenset({"attn_implementation", "dtype", "quantization_config", "torch_dtype"})


@dataclass(frozen=True)
class UserPlan:
    """A user's configuration.

    Attributes:
        plan: what is traced; its ``args`` hold the sizes of the configuration.
        assumptions: what was assumed where the configuration alone does not say, in sentences.
    """

    plan: TrainingPlan
    assumptions: tuple[str, ...]


def user_plan(config: object, peft_config: object | None, *, evaluates: bool = False) -> UserPlan:
    """Return the plan of a trainer's configuration and a PEFT configuration.

    Args:
        evaluates: whether evaluation is traced too.

    Raises:
        InputError: it is for an unknown trainer or kind of PEFT, or sets something that a trace does not support; the
            message names it.
    """
    names = [kind.__name__ for kind in type(config).__mro__]
    trainer = next((item for item in trainers().values() if item.config_class in names), None)
    if trainer is None or not dataclasses.is_dataclass(config):
        known = ", ".join(item.config_class for item in trainers().values())
        raise InputError(f"A {names[0]} is no configuration that autotune knows.", hint=f"It knows {known}.")
    own, sizes = trainer.config_fields, _fields(trainer, only_sizes=True) - _WITHOUT_EFFECT_EVALUATION
    traced = _TRACED | own.traced | _fields(trainer, only_sizes=False)
    without_effect = _WITHOUT_EFFECT | _WITHOUT_EFFECT_EVALUATION | own.without_effect | own.assumed.keys()
    _check(config, trainer.config_class, traced | sizes | without_effect, _WITHOUT_EFFECT_BEGINNINGS)
    args = {name: _plain(name, value) for name, value in _values(config, traced | sizes) if value is not None}
    loading = _values_of_loading(config)
    words, assumptions = _model_words(loading)
    plan = TrainingPlan(trainer.name, args, {**words, **_peft_words(peft_config)})
    if evaluates:
        plan = dataclasses.replace(plan, args={**plan.args, "eval_strategy": EVALUATED})
    return UserPlan(plan, (*assumptions, *_config_assumptions(config, trainer, evaluates=evaluates)))


def _fields(trainer: Trainer, *, only_sizes: bool) -> frozenset[str]:
    """Return the fields that techniques write as a whole, and not a key of them."""
    paths = [path.split(".") for item in trainer.techniques if item.only_sizes is only_sizes for path in item.writes]
    return frozenset(path[1] for path in paths if path[0] == "args" and len(path) == 2)


def _values(config: object, names: frozenset[str]) -> Iterator[tuple[str, Any]]:
    return ((name, getattr(config, name)) for name in sorted(names) if hasattr(config, name))


def _check(config: Any, kind: str, understood: frozenset[str], beginnings: tuple[str, ...] = ()) -> None:
    """Check that fields that are not understood are at their defaults.

    Raises:
        InputError: a field is not.
    """
    for field in dataclasses.fields(config):
        if field.name in understood or field.name.startswith(beginnings):
            continue
        default = field.default_factory() if callable(field.default_factory) else field.default
        value = getattr(config, field.name, default)
        if value != default and value not in (None, {}, []):
            raise InputError(
                f"What {kind}({field.name}={value!r}) does to memory is not known to autotune.",
                hint="Leave it out, or let autotune probe measure it.",
            )


def _plain(name: str, value: object) -> object:
    """Return a value in its JSON form.

    Raises:
        InputError: it has none.
    """
    plain = value.value if isinstance(value, Enum) else value
    try:
        json.dumps(plain)
    except TypeError as error:
        raise InputError(
            f"{name}={value!r} cannot be handed to the process that traces.", hint="Give words and numbers only."
        ) from error
    return plain


def _config_assumptions(config: Any, trainer: Trainer, *, evaluates: bool) -> Iterator[str]:
    yield from (said for name, said in trainer.config_fields.assumed.items() if getattr(config, name, None))
    if getattr(config.eval_strategy, "value", config.eval_strategy) != NO_EVALUATION and not evaluates:
        yield "evaluation is left out"


def _values_of_loading(config: Any) -> Mapping[str, Any]:
    loading = dict(config.model_init_kwargs or {})
    for name, value in loading.items():
        if name not in _LOADING | _LOADING_WITHOUT_EFFECT and value is not None:
            raise InputError(
                f"What model_init_kwargs' {name}={value!r} does to memory is not known to autotune.",
                hint="Write what changes the model into its config.json, or let autotune probe measure it.",
            )
    return loading


def _model_words(loading: Mapping[str, Any]) -> tuple[dict[str, object], tuple[str, ...]]:
    dtype = str(loading.get("dtype") or loading.get("torch_dtype") or "float32").removeprefix("torch.")
    words: dict[str, object] = {"dtype": dtype, "use_peft": False}
    if loading.get("attn_implementation"):
        words["attn_implementation"] = loading["attn_implementation"]
    quantization = loading.get("quantization_config")
    if quantization is None:
        return words, ()
    facts = dict(quantization if isinstance(quantization, Mapping) else quantization.to_dict())
    method = str(getattr(facts.get("quant_method"), "value", facts.get("quant_method", "bitsandbytes")))
    if method != "bitsandbytes":
        raise InputError(f"Quantisation by {method} is not understood.", hint="transformers' BitsAndBytesConfig is.")
    for name in ("llm_int8_skip_modules", "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight"):
        if facts.get(name):
            raise InputError(
                f"What BitsAndBytesConfig({name}={facts[name]!r}) does to memory is not known to autotune."
            )
    if facts.get("load_in_8bit"):
        return {**words, "load_in_8bit": True}, ()
    if not facts.get("load_in_4bit"):
        return words, ()
    words |= {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": facts.get("bnb_4bit_quant_type") or "fp4",
        "use_bnb_nested_quant": bool(facts.get("bnb_4bit_use_double_quant")),
    }
    computes = str(facts.get("bnb_4bit_compute_dtype") or "float32").removeprefix("torch.")
    same = computes == dtype
    return words, () if same else (f"4-bit weights are expanded to {dtype}, as TRL would, not to {computes}",)


def _peft_words(peft_config: Any) -> dict[str, object]:
    if peft_config is None:
        return {}
    kind = type(peft_config).__name__
    if kind != "LoraConfig":
        raise InputError(f"A {kind} is not understood.", hint="peft.LoraConfig is.")
    _check(peft_config, kind, _LORA_WITHOUT_EFFECT | _LORA_WORDS.keys())
    given = {word: getattr(peft_config, name) for name, word in _LORA_WORDS.items()}
    plain = {word: sorted(value) if isinstance(value, set | tuple) else value for word, value in given.items()}
    # Without a task PEFT wraps any model as it is, and trl.ModelConfig's default is that of a language model.
    task = getattr(peft_config.task_type, "value", peft_config.task_type)
    words = {word: value for word, value in plain.items() if value is not None}
    return {"use_peft": True, "lora_task_type": task, **words}
