"""Compares the optimizer of a running training with the one that its arguments name, which a trace has."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from autotune.errors import InputError

_LIBRARIES = ("trl", "transformers")
_OF_GROUPS = frozenset({"lr", "weight_decay"})
"""Options that transformers sets for each group of weights; the defaults of an optimizer may be others."""
_PLAIN = (bool, int, float, str, type(None))


def check_optimizer(trainer: Any) -> None:
    """Check that a trainer has the optimizer that ``args.optim`` names, as a trace assumes.

    The optimizer exists when training begins (transformers 5.23, ``Trainer._prepare_for_training``), in a wrapper of
    accelerate. It counts as the named one if it has the same class and the same switches, such as ``fused``, which
    decide on temporary memory. DeepSpeed discards an optimizer that is passed to the trainer (``deepspeed_init``) and
    replaces others: with it, the trainer may have no other way of creating one.

    Raises:
        InputError: it has another optimizer, or may have one.
    """
    if trainer is None:
        return
    from transformers import Trainer

    if trainer.is_deepspeed_enabled:
        method = getattr(type(trainer), "create_optimizer", Trainer.create_optimizer)
        own_method = method.__module__.partition(".")[0] not in _LIBRARIES
        if own_method or getattr(trainer, "optimizer_cls_and_kwargs", None) is not None:
            raise InputError("The trainer creates its own optimizer, which is not traced.")
        return
    own = trainer.optimizer
    while type(own).__module__.partition(".")[0] == "accelerate":
        own = own.optimizer
    try:
        # Without the model, to which some optimizers would add hooks; these are refused, and not compared.
        kind, options = Trainer.get_optimizer_cls_and_kwargs(trainer.args, None)
    except (ValueError, ImportError):
        return
    if type(own) is not kind or not _has_switches(own, kind, options):
        name, named = f"{type(own).__module__.partition('.')[0]}'s {type(own).__name__}", trainer.args.optim.value
        raise InputError(f"The trainer has its own optimizer ({name}), not optim={named}: it is not traced.")


def _has_switches(own: Any, kind: type[Any], options: Mapping[str, Any]) -> bool:
    """Return whether an optimizer has the switches and whole numbers with which its class would be created."""
    wanted = {name: each.default for name, each in inspect.signature(kind).parameters.items()} | dict(options)
    # bitsandbytes keeps some in an object of its own.
    held = {**vars(own), **getattr(getattr(own, "args", None), "__dict__", {}), **own.defaults}
    return all(
        held[name] == value
        for name, value in wanted.items()
        if name not in _OF_GROUPS and isinstance(value, bool | int | None) and isinstance(held.get(name, own), _PLAIN)
    )
