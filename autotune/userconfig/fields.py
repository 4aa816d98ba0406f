"""Converts the values of a user's configuration into a training plan, and checks every field.

There are four kinds of fields: 1. those passed to the traced trainer unchanged; 2. sizes, which the micro-batch's shape
replaces; 3. those without effect on memory and time of a step; 4. all others, which must be at their defaults.
``fields.yaml`` lists the first and the third kind. New fields of a release are of the fourth.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from math import inf
from pathlib import Path
from typing import Any

import yaml

from autotune.core.configuration import Configuration
from autotune.core.files.json_text import is_json
from autotune.core.files.nested import mapping
from autotune.core.plan import EVALUATED_ONCE, NO_CHECKPOINTS, SAVING, TrainingPlan
from autotune.core.workload import CHAT_TEMPLATE
from autotune.errors import InputError
from autotune.inspection.paths import is_file
from autotune.techniques.sharding import ENGINE_FIELDS
from autotune.techniques.sync_each_batch import SYNCED
from autotune.trainers import trainers
from autotune.trainers.base import EVAL_STRATEGY, Trainer
from autotune.trainers.declared import LOADING
from autotune.trainers.distillation import TEACHER_LOADING
from autotune.trainers.prompts import Prompted

ORDER, BY_LENGTH = "train_sampling_strategy", "group_by_length"
"""The field for the order of rows, and its value for rows of similar lengths together."""
_IN_ORDER, _GENERATION = "sequential", "generation_kwargs"
_TEMPLATE_FILES = (".jinja", ".j2")
_STORAGE, _STORED = "bnb_4bit_quant_storage", "uint8"
# Keys of transformers' BitsAndBytesConfig that trl.ModelConfig has no field for, with their defaults.
_BITSANDBYTES: Mapping[str, object] = {
    "llm_int8_enable_fp32_cpu_offload": False, "llm_int8_has_fp16_weight": False, "llm_int8_skip_modules": None,
    "llm_int8_threshold": 6.0,
}  # fmt: skip


@cache
def tables() -> Mapping[str, Mapping[str, Any]]:
    """Return ``fields.yaml``: fields by class and kind; its head describes the kinds."""
    content: Mapping[str, Mapping[str, Any]]
    content = yaml.safe_load(files(__package__).joinpath("fields.yaml").read_text(encoding="utf-8"))
    return content


def fields_of_kind(of: str, kind: str = "without_effect") -> frozenset[str]:
    """Return the fields of a class and a kind in :func:`tables`."""
    return frozenset(tables()[of][kind])


@dataclass(frozen=True)
class UserPlan:
    """A user's configuration.

    Attributes:
        plan: the plan to trace; its ``args`` have the sizes of the configuration.
        assumptions: values that the configuration does not determine, in sentences.
    """

    plan: TrainingPlan
    assumptions: tuple[str, ...]


def user_plan(
    config: Configuration, model: Mapping[str, object], *, evaluates: bool = False, reads: bool = False
) -> UserPlan:
    """Return the plan of a trainer's configuration.

    Args:
        model: fields of ``trl.ModelConfig`` that are not in the configuration's ``model_init_kwargs``.
        evaluates: whether evaluation is traced too.
        reads: whether rows are read by the configuration (:func:`reading_of`).

    Raises:
        InputError: the trainer is unknown, or a trace does not support a setting, which the message names.
    """
    trainer = trainer_of(config)
    own, traced = trainer.config_fields, traced_fields(trainer)
    assumed: Mapping[str, str] = {**tables()["training"]["assumed"], **own.assumed}
    without_effect = fields_of_kind("training") | own.without_effect | assumed.keys()
    without_effect |= fields_of_kind("evaluation", "traced")
    if not evaluates:
        without_effect |= fields_of_kind("evaluation")
    check_understood(config, traced | without_effect | {ORDER}, tuple(fields_of_kind("training", "beginnings")))
    _check_template(config.values.get(CHAT_TEMPLATE))
    _check_each(config, _GENERATION, fields_of_kind("generation"))
    if isinstance(trainer, Prompted) and config.values.get(trainer.max_completion_field, 1) is None:
        # Both defaults come from other libraries (transformers' GenerationConfig, vLLM's max_model_len).
        raise InputError(
            f"{trainer.max_completion_field}: null is not planned: transformers then ends completions after 20 tokens,"
            " and vLLM at the model's length.",
            hint="Write a number of tokens.",
        )
    kept = sorted(traced & config.values.keys())
    args = {name: as_json(name, config.values[name]) for name in kept if config.values[name] is not None}
    if args.get(SAVING) != NO_CHECKPOINTS:
        # All other strategies save the same.
        args.pop(SAVING, None)
    for name in sorted(_fields(trainer, only_sizes=True) & args.keys()):
        size = args[name]
        if isinstance(size, int) and not isinstance(size, bool) and size < 1:
            raise InputError(f"{name}={size} is not supported.", hint="Write 1 or more.")
    args |= _accelerator_args(config)
    loading = _values_of_loading(config)
    placing = {name: loading[name] for name in loading.keys() & fields_of_kind("loading", "in_plans")}
    args |= {LOADING: placing} if placing and is_json(placing) else {}
    words, assumptions = _model_words({**model, **loading})
    _model_words(_values_of_loading(config, TEACHER_LOADING))
    known = own.reading if reads else frozenset()
    assumptions += _order_assumption(config, trainer)
    switched = {name for name in assumed if bool(config.values.get(name)) is not bool(config.defaults.get(name))}
    assumptions += tuple(text for name, text in assumed.items() if name in switched - known)
    if evaluates:
        rows = config.values["per_device_eval_batch_size"]
        args |= {"eval_strategy": EVAL_STRATEGY, "per_device_eval_batch_size": rows}
        args |= {} if config.evaluates_between_steps else {EVALUATED_ONCE: True}
    elif config.evaluates:
        assumptions += ("evaluation is left out",)
    return UserPlan(TrainingPlan(trainer.name, args, {**model, **words}), assumptions)


def reading_of(config: Configuration) -> Mapping[str, object]:
    """Return the fields of a trainer's configuration for reading rows that differ from their defaults."""
    names = sorted(trainer_of(config).config_fields.reading & config.values.keys())
    found = {name: as_json(name, config.values[name]) for name in names if config.values[name] != config.defaults[name]}
    if CHAT_TEMPLATE in found:
        found[CHAT_TEMPLATE] = str(Path(str(found[CHAT_TEMPLATE])).absolute())
    return found


def with_nulls(plan: TrainingPlan, config: Configuration) -> TrainingPlan:
    """Return a configuration's plan with the fields that the configuration sets to null, against TRL's default."""
    nulls = {name: None for name, value in config.values.items() if value is None is not config.defaults.get(name)}
    return replace(plan, args={**nulls, **plan.args})


def smoke_test_arguments(config: Configuration, names: Collection[str]) -> Mapping[str, object]:
    """Return the arguments among some fields of a configuration with which a tiny model is trained on a CPU."""
    training, own = tables()["training"], trainer_of(config).config_fields
    left_out = {*training["not_in_smoke_test"], *(own.reading - own.traced), *ENGINE_FIELDS}
    # Other keys may name code of the hub (`custom_generate`).
    if mapping(config.values.get(_GENERATION)).keys() - fields_of_kind("generation"):
        left_out.add(_GENERATION)
    # Rows that TRL takes as they are, are not packed either.
    if mapping(config.values.get("dataset_kwargs")).get("skip_prepare_dataset"):
        left_out.add("packing")
    keys: Mapping[str, str] = training["keys_not_in_smoke_test"]
    values = {
        name: {key: item for key, item in value.items() if key != keys.get(name)}
        if isinstance(value, Mapping)
        else value
        for name, value in config.values.items()
    }
    return {
        name: value
        for name, value in values.items()
        if name in names
        and name not in left_out
        and not name.startswith(tuple(training["beginnings_not_in_smoke_test"]))
        # Jobs exchange infinities and NaN too.
        and (is_json(value) or isinstance(value, float))
    }


def keeps_order(config: Configuration) -> bool:
    """Whether a configuration trains on rows in the order of the dataset."""
    return config.values.get(ORDER) == _IN_ORDER


def traced_fields(trainer: Trainer) -> frozenset[str]:
    """Return the fields of a trainer's configuration that affect a step, including sizes."""
    sizes = _fields(trainer, only_sizes=True) - fields_of_kind("evaluation", "traced")
    written = _fields(trainer, only_sizes=False) - set(ENGINE_FIELDS)
    return fields_of_kind("training", "traced") | trainer.config_fields.traced | written | sizes


def trainer_of(config: Configuration) -> Trainer:
    """Return the trainer that a configuration is for.

    Raises:
        InputError: there is none.
    """
    found = next((item for item in trainers().values() if item.config_class == config.kind), None)
    if found is None:
        known = ", ".join(item.config_class for item in trainers().values())
        raise InputError(f"{config.kind} is not a supported configuration.", hint=f"Supported are {known}.")
    return found


def _fields(trainer: Trainer, *, only_sizes: bool) -> frozenset[str]:
    """Return the fields that techniques of sizes, or all other techniques, write as a whole."""
    paths = [
        path.split(".")
        for item in trainer.techniques
        if item.impact.sets_only_sizes is only_sizes
        for path in item.writes
    ]
    return frozenset(path[1] for path in paths if path[0] == "args" and len(path) == 2)


def check_understood(config: Configuration, understood: frozenset[str], beginnings: tuple[str, ...] = ()) -> None:
    """Check that fields with an unknown effect are at their defaults.

    Raises:
        InputError: a field is not.
    """
    for name, value in config.values.items():
        if name in understood or name.startswith(beginnings):
            continue
        if value != config.defaults[name] and value not in (None, {}, []):
            raise _unknown_effect(f"{config.kind}({name}={value!r})", "Leave it out, or let autotune probe measure it.")


def _order_assumption(config: Configuration, trainer: Trainer) -> tuple[str, ...]:
    """Return the assumption about the order of rows if it is not TRL's default.

    Raises:
        InputError: TRL has no such order for the trainer's rows, or the order changes the sizes of micro-batches.
    """
    field = trainer.shuffled_by or ORDER
    order = config.values.get(field)
    if order == config.defaults.get(field):
        return ()
    # LengthGroupedSampler of transformers counts a single column of tokens; its BatchRebalanceSampler varies rows.
    by_length = any(form.tokenized and len(form.columns) == 1 for form in trainer.formats)
    supported = field != ORDER or order == _IN_ORDER or (order == BY_LENGTH and by_length)
    if trainer.ordered or not supported:
        raise InputError(f"autotune does not support {ORDER}={order} for {trainer.label}.", hint=f"Leave out {ORDER}.")
    return (f"speeds are for rows in random order, but {field}={order} forms other micro-batches",)


def _unknown_effect(what: str, hint: str = "") -> InputError:
    return InputError(f"The effect of {what} on memory is not known.", hint=hint)


def as_json(name: str, value: object) -> object:
    """Return a value as JSON types; infinity, such as a norm without a limit, becomes the largest number.

    Raises:
        InputError: JSON has no such type.
    """
    if value == inf:
        return sys.float_info.max
    if not is_json(value):
        raise InputError(
            f"{name}={value!r} cannot be passed to the process that traces.", hint="Give words and numbers only."
        )
    return value


def _check_template(path: object) -> None:
    """Check that a chat template is a file or unset: the template of another model also changes the vocabulary.

    Raises:
        InputError: it is not.
    """
    if path is None or (is_file(str(path)) and str(path).endswith(_TEMPLATE_FILES)):
        return
    raise InputError(
        f"{CHAT_TEMPLATE}={path} is not a template file ({' or '.join(_TEMPLATE_FILES)}) here. From a model, TRL also "
        "takes tokens and resizes the vocabulary, whose effect on memory is not known.",
        hint="Save the template alone to a file, and name that.",
    )


def _values_of_loading(config: Configuration, field: str = LOADING) -> Mapping[str, Any]:
    hint = "Write changes of the model into its config.json, or let autotune probe measure it."
    # use_cache: Trainer sets it for the trained model by its argument, and TRL turns it off except in generation.
    unused = frozenset() if isinstance(trainer_of(config), Prompted) else frozenset({"use_cache"})
    keys = _check_each(config, field, unused.union(*tables()["loading"].values()), hint)
    placed = keys.get("device_map")
    if isinstance(placed, Mapping) and placed.keys() != {""}:
        raise _unknown_effect(f"{field}' device_map={placed!r}", "Leave it out.")
    return keys


def _check_each(
    config: Configuration, field: str, understood: frozenset[str], hint: str = "Leave it out."
) -> dict[str, Any]:
    """Return a mapping of a configuration after checking that all its keys are supported.

    Raises:
        InputError: a key is not.
    """
    given = config.values.get(field)
    keys = dict(given) if isinstance(given, Mapping) else {}
    for name, value in keys.items():
        if name not in understood and value is not None:
            raise _unknown_effect(f"{field}' {name}={value!r}", hint)
    return keys


def _accelerator_args(config: Configuration) -> Mapping[str, object]:
    """Return the part of ``accelerator_config`` that affects a step.

    Raises:
        InputError: it divides micro-batches, or its gradient accumulation differs from the arguments'.
    """
    _, field, kwargs, synced = SYNCED.split(".")
    keys = config.keys(field)
    if keys.get("split_batches"):
        hint = "Write per_device_train_batch_size divided by the number of processes, and leave it out."
        raise _unknown_effect(f"{field}.split_batches=True", hint)
    # transformers adds the number of steps when it creates a trainer.
    own = {name: value for name, value in mapping(keys.get(kwargs)).items() if (name, value) != ("num_steps", 1)}
    if own.keys() - {synced}:
        raise _unknown_effect(f"{field}.{kwargs}={own!r}", f"Leave out all but {synced}.")
    return {field: {kwargs: {synced: True}}} if own.get(synced) else {}


def _model_words(loading: Mapping[str, Any]) -> tuple[dict[str, object], tuple[str, ...]]:
    # As transformers and TRL (`from_pretrained`, `create_model_from_path`): torch_dtype counts only if dtype is null.
    dtype = str(loading.get("dtype", "float32") or loading.get("torch_dtype") or "auto").removeprefix("torch.")
    words: dict[str, object] = {"dtype": dtype, "use_peft": bool(loading.get("use_peft"))}
    if loading.get("attn_implementation"):
        words["attn_implementation"] = loading["attn_implementation"]
    quantization = loading.get("quantization_config")
    if quantization is None:
        return words, ()
    if not isinstance(quantization, Mapping) and not hasattr(quantization, "to_dict"):
        raise _unknown_effect(f"quantization_config={quantization!r}", "transformers' BitsAndBytesConfig is.")
    facts = dict(quantization if isinstance(quantization, Mapping) else quantization.to_dict())
    method = str(getattr(facts.get("quant_method"), "value", facts.get("quant_method", "bitsandbytes")))
    if method != "bitsandbytes":
        raise InputError(f"Quantisation by {method} is not supported.", hint="transformers' BitsAndBytesConfig is.")
    for name, default in _BITSANDBYTES.items():
        if facts.get(name) not in (default, None, []):
            raise _unknown_effect(f"BitsAndBytesConfig({name}={facts[name]!r})")
    if facts.get("load_in_8bit"):
        return {**words, "load_in_8bit": True}, ()
    if not facts.get("load_in_4bit"):
        return words, ()
    words |= {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": facts.get("bnb_4bit_quant_type") or "fp4",
        "use_bnb_nested_quant": bool(facts.get("bnb_4bit_use_double_quant")),
    }
    stored = str(facts.get(_STORAGE) or _STORED).removeprefix("torch.")
    words |= {_STORAGE: stored} if stored != _STORED else {}
    computes = str(facts.get("bnb_4bit_compute_dtype") or "float32").removeprefix("torch.")
    same = computes == dtype
    return words, () if same else (f"4-bit weights are expanded to {dtype}, as TRL would, not to {computes}",)
