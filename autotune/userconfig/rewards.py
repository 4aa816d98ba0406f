"""Finds the reward functions that a configuration names: the user's own are imported only where that is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.core.configuration import Configuration, ReadCommand
from autotune.errors import InputError, UnreadError
from autotune.trainers.prompts import NO_REWARD

_FUNCTIONS, _MODEL, _WEIGHTS = "reward_funcs", "reward_model_name_or_path", "reward_weights"


@dataclass(frozen=True)
class Rewards:
    """The reward functions of a training.

    Attributes:
        built: names of those that the trainer is built and run with; one of TRL's own in place of each that is left.
        own: the dotted paths of the user's own.
        imported: whether these are imported, by the processes that build and run the trainer.
    """

    built: tuple[str, ...]
    own: tuple[str, ...] = ()
    imported: bool = False

    def sentence(self, *, probed: bool) -> str:
        """Return how a check treats the user's own functions, in a sentence; empty if there are none."""
        named = ", ".join(self.own)
        if not self.own:
            return ""
        if not self.imported:
            return f"Not imported (--import does): {named}. A reward function of TRL's own stands in for each of them."
        if probed:
            return f"Imported and run: {named}."
        return f"Imported and not run: {named}. Their own device memory is not counted."


def named_rewards(read: ReadCommand) -> tuple[str, ...]:
    """Return the reward functions that TRL's script is given; none where it names none.

    Raises:
        UnreadError: it names a reward model.
    """
    if read.script.get(_MODEL):
        raise UnreadError(f"A reward model ({_MODEL}) is not supported.")
    named = read.script.get(_FUNCTIONS)
    return tuple(map(str, named)) if isinstance(named, list) else ()


def rewards_of(read: ReadCommand, config: Configuration, *, by_command: str = "", imports: bool) -> Rewards:
    """Return the reward functions of a configuration of a trainer that generates completions.

    A name without a dot is one of TRL's (trl/scripts/grpo.py). Where none is named, as with a script of the user's own
    or a configuration object, there are as many as weights.

    Args:
        by_command: TRL's own command that trains by the configuration, such as ``trl grpo``; empty: something else.
        imports: whether modules of the user's own may be imported.

    Raises:
        InputError: TRL's own command gets no reward function.
        UnreadError: it names a reward model.
    """
    names = named_rewards(read)
    if by_command and not names:
        raise InputError(
            f"reward_funcs names no reward function, and `{by_command}` has none of its own to score completions.",
            hint="Name one, such as reward_funcs: [my_rewards.length].",
        )
    weights = config.values.get(_WEIGHTS)
    if not names:
        return Rewards((NO_REWARD,) * (len(weights) if isinstance(weights, list) and weights else 1))
    own = tuple(name for name in names if "." in name)
    return Rewards(tuple(NO_REWARD if name in own and not imports else name for name in names), own, imports)
