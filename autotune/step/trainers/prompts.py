"""Adapter base of trainers on prompts: tokenises prompts, sets completion lengths, and loads reward functions."""

from __future__ import annotations

import importlib
import inspect
import sys
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset, concatenate_datasets
from trl import rewards
from trl.data_utils import is_conversational
from trl.trainer.utils import is_async_callable

from autotune.core.plan import TrainingPlan
from autotune.core.workload import NO_DATA, Rollouts
from autotune.errors import AutotuneError, InputError
from autotune.step.images.sizes import image_column
from autotune.step.images.tokens import IMAGE_COLUMNS, image_elements, with_prompts
from autotune.step.rows import Counts, Flags, RowSizes
from autotune.step.trainers.base import Adapter
from autotune.trainers.prompts import COMPLETION, NO_REWARD, PROMPT, REWARD_HINT, TRL_REWARDS, check_reward_names

COMPLETION_TOKENS = "autotune_completion_tokens"
"""Column with the number of tokens to generate for each completion of a row."""
NO_TOKEN = 2**31 - 1
"""Token id beyond every vocabulary. If only it ends completions, all are generated to the maximum length, as real ones
may be. ``min_new_tokens`` has that effect, too, but computes the scores of all tokens three more times."""
_SEED = 0
_REWARDS_SHOWN = 60
"""Characters of a reward function's unusable result in a message."""
# The settings of trl/scripts/grpo.py.
_TRL_REWARDS: dict[str, Callable[..., Any]] = {
    **{name: getattr(rewards, name) for name in TRL_REWARDS},
    NO_REWARD: rewards.get_soft_overlong_punishment(max_completion_len=1280, soft_punish_cache=256),
}
_MESSAGE_REWARDS = _TRL_REWARDS.keys() - {NO_REWARD}
"""TRL's reward functions that read messages (``completion[0]["content"]``), which need conversational prompts."""

COMPLETED = ("prompts", "completions", "completion_ids")
"""Arguments of a reward function that TRL names in its call, before those of :class:`RewardArguments`."""


@dataclass(frozen=True)
class RewardArguments:
    """The keyword arguments that TRL passes to a reward function (``GRPOTrainer._calculate_rewards``).

    Attributes:
        own: those in addition to the dataset's columns.
        unpassed: the columns that TRL omits.
    """

    own: tuple[str, ...] = (*COMPLETED, "trainer_state", "log_extra", "log_metric")
    unpassed: tuple[str, ...] = ("prompt", "completion", "completion_ids")

    def of(self, columns: Iterable[str], removed: Collection[str] = ()) -> list[str]:
        """Return the names of all arguments, given the dataset's columns and those that TRL removes from it.

        Raises:
            InputError: a column has the name of an argument in TRL's call, which Python refuses.
        """
        passed = [name for name in columns if name not in {*self.unpassed, *removed}]
        twice = [name for name in passed if name in COMPLETED]
        if twice:
            raise InputError(
                f"The dataset has the column {twice[0]}: TRL passes reward functions its own {twice[0]} and each column"
                " by its name, and fails with a TypeError in the first step.",
                hint="Rename the column.",
            )
        return list(dict.fromkeys([*self.own, *passed]))


class RewardError(AutotuneError):
    """A user's reward function failed."""


class Prompted(Adapter):
    """Rows of a prompt, with all columns that a reward function may read.

    Probes and traces set the number of tokens of each completion (:data:`COMPLETION_TOKENS`): the model generates until
    the longest one has its length, and the others are cut.

    Class attributes:
        completions_per_row: completions of a row in a micro-batch.
        reward_arguments: what TRL passes to reward functions.
    """

    columns = (PROMPT, COMPLETION)
    completions_per_row: ClassVar[int] = 1
    reward_arguments: ClassVar[RewardArguments] = RewardArguments()

    @property
    def tokenizing(self) -> Mapping[str, object]:
        """Return arguments of a trainer that only tokenises."""
        return {"gradient_checkpointing": False, "bf16": False, "use_cpu": True}

    @abstractmethod
    def prompt_ids(self, trainer: Any, prompts: Sequence[Any]) -> Sequence[Sequence[int]]:
        """Return the tokens of prompts, text or messages, tokenised as by the trainer."""

    @abstractmethod
    def max_completion_tokens(self, trainer: Any) -> int:
        """Return the maximum tokens of a completion."""

    def tokenized(self, trainer: Any, rollouts: Rollouts, dataset: str) -> Dataset:
        """Return all columns, with the tokens of prompts and of a column of completions.

        Raises:
            InputError: that column or a reward function is missing, TRL cannot call the function with these columns,
                or the function needs messages where prompts are text; or TRL refuses the images of a row.
        """
        tokenizer, columns = trainer._tokenizer, trainer.train_dataset.column_names
        check_reward_names(rollouts.rewards)
        for name in rollouts.rewards:
            reward_function(name)
        if self.specification.scores and dataset != NO_DATA:
            removed = _removed_columns(trainer)
            passed = self.reward_arguments.of(columns, removed)
            for name in rollouts.rewards:
                check_arguments(name, passed, columns, removed)
                _check_messages(name, trainer.train_dataset)
        if rollouts.column is not None and rollouts.column not in columns:
            raise InputError(
                f"The dataset has no column {rollouts.column!r}, which was named for the length of completions.",
                hint=f"It has {', '.join(columns)}; a number of tokens can be given instead.",
            )

        def completions(batch: Mapping[str, list[Any]], rows: int) -> list[list[int]]:
            texts = [str(text) for text in batch[rollouts.column]] if rollouts.column else []
            return list(tokenizer(text=texts)["input_ids"]) if texts else [[]] * rows

        if image_column(trainer.train_dataset) is not None:
            return with_prompts(
                trainer, lambda row: {COMPLETION: completions({name: [row[name]] for name in row}, 1)[0]}, dataset
            )

        def tokens(batch: dict[str, list[Any]]) -> dict[str, list[list[int]]]:
            prompts = self.prompt_ids(trainer, batch["prompt"])
            return {PROMPT: [list(ids) for ids in prompts], COMPLETION: completions(batch, len(prompts))}

        return trainer.train_dataset.map(tokens, batched=True)

    def trainable(self, rows: Dataset) -> Counts:
        """Return the tokens of prompts; those of completions depend on the plan."""
        return np.asarray(self.lengths(rows)[:, 0])

    def completions(self, rows: Dataset) -> Counts | None:
        """Return the tokens of known completions."""
        tokens = np.asarray(self.lengths(rows)[:, 1])
        return tokens if tokens.any() else None

    def arguments(self, plan: TrainingPlan) -> Mapping[str, Any]:
        """Return the reward functions of a plan, or one that costs nothing if it has none.

        Raises:
            InputError: a reward function does not exist.
        """
        return {"reward_funcs": [_named_reward(name) for name in plan.rewards or (NO_REWARD,)]}

    def sizes(self, trainer: Any) -> RowSizes:
        """Return the sizes of prompts and of their typical completions."""
        rows, most, count = trainer.train_dataset, self.max_completion_tokens(trainer), self.completions_per_row
        known, prompts = self.completions(rows), self.lengths(rows)[:, :1]
        typical = np.full(len(rows), default_completion_tokens(trainer.plan)) if known is None else known
        # The lengths of a row's completions vary like those of different rows.
        shuffle = np.random.default_rng(_SEED).permutation
        completions = np.stack([typical, *(shuffle(typical) for _ in range(count - 1))], axis=1)
        generated = np.minimum(np.maximum(completions, 1), most)
        return RowSizes(
            np.repeat(prompts, count, axis=1),
            prompts[:, 0],
            generated=generated,
            max_generated=most,
            image_elements=image_elements(rows),
        )

    def select_batches(self, trainer: Any, order: Counts, worst: Flags, longest: Flags | None = None) -> Dataset:
        """Return prompts with the lengths of their completions, which are the maximum in the worst micro-batches.

        There, all others are one token shorter, so that every micro-batch is padded and has a mask.
        """
        sizes, rows = self.sizes(trainer), trainer.train_dataset
        assert sizes.generated is not None
        shorter = np.full_like(sizes.generated, max(1, sizes.max_generated - 1))
        most = shorter.copy()
        most[:, 0] = sizes.max_generated
        # TRL passes all remaining columns to reward functions.
        rows = rows.remove_columns([name for name in (COMPLETION, *IMAGE_COLUMNS) if name in rows.column_names])
        # Concatenate first, then select: adding a column to selected rows would copy rows once per selection.
        offsets = np.arange(0, sizes.generated.size + 1, self.completions_per_row, dtype=np.int32)
        lengths = (pa.ListArray.from_arrays(offsets, each.ravel()) for each in (sizes.generated, shorter, most))
        candidates = concatenate_datasets([rows.add_column(COMPLETION_TOKENS, wanted) for wanted in lengths])
        if longest is None:
            longest = np.zeros(order.shape, dtype=bool)
            longest[worst, 0] = True
        variant = np.zeros_like(order)
        variant[worst] = 1
        variant[longest] = 2
        return candidates.select((order + variant * len(rows)).ravel(), keep_in_memory=True)

    def synthetic(self, rows: Sequence[tuple[int, ...]], plan: TrainingPlan, trainable: float) -> Dataset:
        """Return prompts of one repeated token, with completions of the given lengths."""
        return super().synthetic(rows, plan, trainable).add_column("prompt", ["a"] * len(rows))


def reward_function(name: str) -> Callable[..., Any]:
    """Find a reward function as TRL's scripts do: by its name in TRL, or by the dotted path of a function.

    Raises:
        InputError: it does not exist, or its module cannot be imported.
    """
    check_reward_names([name])
    if name in _TRL_REWARDS:
        return _TRL_REWARDS[name]
    module, _, function = name.rpartition(".")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module), function, None)
    except (Exception, SystemExit) as error:
        raise InputError(f"The module of reward_funcs' {name} cannot be imported: {error}", hint=REWARD_HINT) from error
    if not callable(found):
        raise InputError(f"{module} has no function {function}, which reward_funcs names.", hint=REWARD_HINT)
    reward: Callable[..., Any] = found
    return reward


def _removed_columns(trainer: Any) -> Collection[str]:
    """Return the dataset's columns that TRL removes before it calls reward functions."""
    if not trainer.args.remove_unused_columns:
        return ()
    trainer._set_signature_columns_if_needed()
    return set(trainer.train_dataset.column_names).difference(trainer._signature_columns)


def check_arguments(
    name: str, passed: Collection[str], columns: Collection[str], removed: Collection[str] = ()
) -> None:
    """Check that TRL can call a reward function.

    Args:
        passed: the names of the keyword arguments that TRL passes, those of the dataset's columns included.
        columns: all columns of the dataset.
        removed: columns that TRL removes by ``remove_unused_columns``.

    Raises:
        InputError: the function needs another argument, does not take one of these, or does not exist.
    """
    parameters = inspect.signature(reward_function(name)).parameters.values()
    named = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    missing = [each.name for each in named if each.default is each.empty and each.name not in passed]
    if missing and set(missing) <= set(removed):
        needed = f"the reward function {name} (reward_funcs) needs"
        raise InputError(
            f"remove_unused_columns removes {', '.join(missing)}, which {needed}.",
            hint="Leave remove_unused_columns out.",
        )
    if missing:
        raise InputError(
            f"The reward function {name} (reward_funcs) needs {', '.join(missing)}, and TRL has no column of that name"
            f" to pass: the dataset has {', '.join(columns)}.",
            hint="Rename a column of the dataset, or name a function that reads only its columns.",
        )
    taken = {each.name for each in named}
    untaken = [argument for argument in passed if argument not in taken]
    if untaken and not any(each.kind is each.VAR_KEYWORD for each in parameters):
        raise InputError(
            f"The reward function {name} (reward_funcs) does not take {', '.join(untaken)}, which TRL passes to it by"
            " name: the first step fails with a TypeError.",
            hint="Add **kwargs to its parameters.",
        )


def _check_messages(name: str, rows: Dataset) -> None:
    """Check that prompts are messages if a reward function of TRL reads messages.

    Raises:
        InputError: prompts are text.
    """
    if name in _MESSAGE_REWARDS and not is_conversational({"prompt": rows[:1]["prompt"][0]}):
        raise InputError(
            f"The reward function {name} (reward_funcs) reads messages, and prompts of text get completions of text:"
            " the first step fails.",
            hint='Make each prompt a list of messages, such as [{"role": "user", "content": …}].',
        )


def _named_reward(name: str) -> Callable[..., Any]:
    """Return a reward function; errors and unusable results of a user's own are a :class:`RewardError` with its name.

    Raises:
        InputError: it does not exist.
    """
    function = reward_function(name)
    if name in _TRL_REWARDS:
        return function

    @wraps(function)
    def call(**columns: Any) -> list[Any]:
        with _name_in_errors(name):
            rewards = function(**columns)
        return _checked_rewards(name, rewards)

    @wraps(function)
    async def call_async(**columns: Any) -> list[Any]:
        with _name_in_errors(name):
            rewards = await function(**columns)
        return _checked_rewards(name, rewards)

    return call_async if is_async_callable(function) else call


def _checked_rewards(name: str, rewards: Any) -> list[Any]:
    """Return rewards as a list, if TRL can read them (``_calculate_rewards``); it checks their number.

    Raises:
        RewardError: they are no numbers.
    """
    try:
        listed = list(rewards)
        numbers = torch.tensor([torch.nan if reward is None else reward for reward in listed], dtype=torch.float32)
        numbers.reshape(len(listed))
    except (TypeError, ValueError, RuntimeError) as error:
        returned = repr(rewards)[:_REWARDS_SHOWN]
        read = "TRL reads a list with a number or None for each completion"
        raise RewardError(f"Your reward function {name} returned {returned}; {read}") from error
    return listed


@contextmanager
def _name_in_errors(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise RewardError(f"Your reward function {name} failed: {type(error).__name__}: {error}") from error


def default_completion_tokens(plan: TrainingPlan) -> int:
    """Return the assumed tokens of a completion of unknown length: the plan's mean, or 1."""
    return round(plan.completions.mean) if plan.completions else 1


def require_generated(tokens: int, expected: int) -> None:
    """Check that completions have at least the expected length before they are cut.

    Raises:
        RuntimeError: they are shorter, so that the run is not the planned one.
    """
    if tokens < expected:
        raise RuntimeError(f"the model generated {tokens} tokens, and {expected} were asked for")
