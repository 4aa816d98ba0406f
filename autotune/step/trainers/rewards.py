"""Finds the reward functions that a plan names, as TRL's scripts do."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trl.rewards import (
    accuracy_reward,
    get_soft_overlong_punishment,
    reasoning_accuracy_reward,
    think_format_reward,
)

from autotune.errors import InputError

# The names and settings of trl/scripts/grpo.py.
_OWN: dict[str, Callable[..., Any]] = {
    "accuracy_reward": accuracy_reward,
    "reasoning_accuracy_reward": reasoning_accuracy_reward,
    "think_format_reward": think_format_reward,
    "get_soft_overlong_punishment": get_soft_overlong_punishment(max_completion_len=1280, soft_punish_cache=256),
}


def reward_function(name: str) -> Callable[..., Any]:
    """Return the reward function of a name: one of TRL's own, or the dotted path of a function.

    Raises:
        InputError: there is none of that name, or its module cannot be imported.
    """
    if name in _OWN:
        return _OWN[name]
    module, _, function = name.rpartition(".")
    hint = f"Give a dotted path from here, such as my_rewards.length, or one of {', '.join(_OWN)}."
    if not module:
        raise InputError(f"There is no reward function {name!r} (reward_funcs).", hint=hint)
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module), function, None)
    except Exception as error:
        raise InputError(f"The module of reward_funcs' {name} cannot be imported: {error}", hint=hint) from error
    if not callable(found):
        raise InputError(f"{module} has no function {function}, which reward_funcs names.", hint=hint)
    reward: Callable[..., Any] = found
    return reward
