"""Spells reward functions as a script imports and passes them, by the names of TRL's ``reward_funcs``."""

from __future__ import annotations

from collections.abc import Sequence

# The names, and the settings, of trl/scripts/grpo.py.
_OF_TRL = {
    "accuracy_reward": "accuracy_reward",
    "reasoning_accuracy_reward": "reasoning_accuracy_reward",
    "think_format_reward": "think_format_reward",
    "get_soft_overlong_punishment": "get_soft_overlong_punishment(max_completion_len=1280, soft_punish_cache=256)",
}


def reward_imports(rewards: Sequence[str]) -> list[str]:
    """Return the lines that import reward functions; a dotted path is found from the working directory, as by TRL."""
    lines = [f"from trl.rewards import {name}" for name in sorted(set(rewards) & _OF_TRL.keys())]
    modules = sorted({name.rpartition(".")[0] for name in rewards if name not in _OF_TRL})
    if not modules:
        return lines
    return [
        *lines,
        "",
        "sys.path.insert(0, str(Path.cwd()))",
        *(f"import {module}  # noqa: E402" for module in modules),
    ]


def reward_expressions(rewards: Sequence[str]) -> str:
    """Return the list of reward functions as an expression."""
    return f"[{', '.join(_OF_TRL.get(name, name) for name in rewards)}]"
