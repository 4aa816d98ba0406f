"""Reads DeepSpeed's document, from the trainer or accelerate, and compares it with the trainer's arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from autotune.confidential import hidden, without_secrets
from autotune.core.configuration import Configuration
from autotune.core.files.json_text import read_json
from autotune.core.files.nested import Key, lookup, mapping, set_or_remove
from autotune.errors import InputError, UnreadError

DEVICES = {"offload_optimizer": "offload_optimizer_device", "offload_param": "offload_param_device"}
"""Sections of ``zero_optimization`` with a device, each with accelerate's own key for it."""
AUTO = "auto"
"""Value of numbers in DeepSpeed's document that transformers derives from the trainer's arguments."""
ON_DEVICE = frozenset({"none", AUTO})
"""Devices by which nothing is offloaded (accelerate 1.15, ``DeepSpeedPlugin``)."""
_ACCUMULATION, _CLIPPING = "gradient_accumulation_steps", "gradient_clipping"
SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", _ACCUMULATION)
"""Numbers of DeepSpeed's document that may be ``auto`` (``trainer_config_process`` of transformers)."""
_DEFAULT_STAGE = 2
# Further keys of the document, with the trainer's arguments that they must equal.
_DERIVED_FROM: Mapping[Key, str] = {
    (_CLIPPING,): "max_grad_norm",
    ("optimizer", "params", "lr"): "learning_rate",
    ("optimizer", "params", "eps"): "adam_epsilon",
    ("optimizer", "params", "weight_decay"): "weight_decay",
    ("scheduler", "params", "warmup_max_lr"): "learning_rate",
}
_FORM = "Write one JSON object in it."
NAMED = "deepspeed_config_file"
"""Accelerate's key for the file of DeepSpeed's document."""


def deepspeed_document(
    document: Mapping[str, object], config: Configuration, accumulation: int | str = 1
) -> Mapping[str, object] | None:
    """Return DeepSpeed's effective document, the trainer's own or accelerate's; None without one.

    Args:
        document: accelerate's document; empty without one.
        accumulation: gradient accumulation of a document in accelerate's file that does not set it; accelerate's
            default is 1.

    Raises:
        InputError: a named file cannot be read.
    """
    if config.values.get("deepspeed"):
        return _document(config.values["deepspeed"])
    if document.get("distributed_type") != "DEEPSPEED":
        return None
    # accelerate sets a precision that the document lacks by the trainer's (``DeepSpeedPlugin.set_mixed_precision``).
    precision = {name: {"enabled": AUTO} for name in ("bf16", "fp16")}
    return {_ACCUMULATION: accumulation, **precision, **_deepspeed(mapping(document.get("deepspeed_config")))}


def _deepspeed(given: Mapping[str, object]) -> Mapping[str, object]:
    """Return DeepSpeed's document, built from accelerate's own keys or read from the file that they name."""
    if given.get(NAMED):
        return _document(given[NAMED])
    zero: dict[str, object] = {"stage": given.get("zero_stage", _DEFAULT_STAGE)}
    zero |= {name: {"device": given[key]} for name, key in DEVICES.items() if str(given.get(key) or "none") != "none"}
    if given.get("zero3_save_16bit_model"):
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    clipping = given[_CLIPPING] if given.get(_CLIPPING) is not None else AUTO
    return {
        **dict.fromkeys(SIZES, AUTO),
        _ACCUMULATION: given.get(_ACCUMULATION) or AUTO,
        "zero_optimization": zero,
        **({_CLIPPING: clipping} if clipping else {}),
        "zero_allow_untested_optimizer": True,
    }


def offload_device(document: Mapping[str, object], part: str) -> str:
    """Return the device to which a document offloads a part of :data:`DEVICES`."""
    zero = mapping(document.get("zero_optimization"))
    return str(mapping(zero.get(part)).get("device") or "none")


def check_devices(document: Mapping[str, object]) -> None:
    """Check that DeepSpeed offloads to no other device than the host, before anything reads the path of a disk.

    Raises:
        UnreadError: it does.
    """
    for part in DEVICES:
        device = offload_device(document, part)
        if device not in {"cpu", *ON_DEVICE}:
            raise UnreadError(
                f"zero_optimization.{part}.device: {device} is neither traced nor probed, only the host's memory is."
                " Write cpu or none."
            )


def with_auto(document: Mapping[str, object], config: Configuration, processes: int | None) -> Mapping[str, object]:
    """Return DeepSpeed's document with ``auto`` for the numbers that transformers derives.

    Raises:
        InputError: it contradicts them.
    """
    found, expected = {**dict.fromkeys(SIZES, AUTO), **document}, dict(_derived_keys(config, processes))
    # Without an expected value, transformers writes none, and DeepSpeed uses its default.
    wrong = [
        f"{'.'.join(path)}: {value}, and the trainer's own arguments give {right}"
        for path, right in expected.items()
        for value in lookup(found, path)
        if value not in (None, AUTO, right) and right is not None
    ]
    if wrong:
        raise InputError(
            f"DeepSpeed's document has {hidden('; '.join(wrong))}: transformers refuses the contradiction.",
            hint=f"Write {AUTO} instead; in accelerate's file, a missing {_ACCUMULATION} counts as 1.",
        )
    for path in expected:
        if lookup(found, path) not in ((), (None,)):
            set_or_remove(found, path, AUTO)
    return found


def _derived_keys(config: Configuration, processes: int | None) -> Iterator[tuple[Key, object]]:
    """Yield the keys of DeepSpeed's document that transformers derives, each with its value; None if it is unknown.

    transformers refuses other values (``integrations/deepspeed.py``, ``trainer_config_process``).

    Args:
        processes: number of started processes; None if it is not known.
    """
    values: Mapping[str, Any] = config.values
    rows, accumulation = values.get("per_device_train_batch_size"), values.get(_ACCUMULATION)
    # One process may mean that the number is unset, so it counts as unknown.
    processes = processes if processes != 1 else None
    counted = [number for number in (rows, accumulation, processes) if isinstance(number, int)]
    # With auto_find_batch_size, transformers fills them in again (`Trainer._update_auto_batch_size`).
    searched = bool(values.get("auto_find_batch_size"))
    yield ("train_batch_size",), prod(counted) if len(counted) == len(SIZES) and not searched else None
    yield ("train_micro_batch_size_per_gpu",), None if searched else rows
    yield (_ACCUMULATION,), accumulation
    for path, field in _DERIVED_FROM.items():
        yield path, values.get(field)
    yield ("optimizer", "params", "betas"), [values.get("adam_beta1"), values.get("adam_beta2")]
    # transformers compares these two when training starts (`trainer_config_finalize`). The number of an epoch's steps,
    # of which `warmup_steps` below 1 is a share, is not known here.
    steps, warmup = values.get("max_steps"), values.get("warmup_steps")
    yield ("scheduler", "params", "total_num_steps"), steps if isinstance(steps, int) and steps > 0 else None
    is_number = isinstance(warmup, (int, float)) and not 0 < warmup < 1
    yield ("scheduler", "params", "warmup_num_steps"), max(1, int(warmup or 0)) if is_number else None
    for name in ("bf16", "fp16"):
        yield (name, "enabled"), bool(values.get(name) or values.get(f"{name}_full_eval"))


def _document(named: object) -> Mapping[str, object]:
    if isinstance(named, Mapping):
        return {str(name): value for name, value in without_secrets(named).items()}
    try:
        read = read_json(Path(str(named)).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"DeepSpeed's document {named} cannot be read: {error.strerror}.",
            hint="Give the path of a JSON file; a relative path starts at the training's working directory.",
        ) from error
    except ValueError as error:
        raise InputError(f"DeepSpeed's document {named} is not JSON: {error}.", hint=_FORM) from error
    if not isinstance(read, dict):
        raise InputError(f"DeepSpeed's document {named} is not a mapping.", hint=_FORM)
    return dict(without_secrets(read))
