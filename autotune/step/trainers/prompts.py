"""The base of adapters of trainers on prompts: tokens of prompts, lengths of completions, reward functions."""

from __future__ import annotations

import importlib
import inspect
import sys
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from datasets import Dataset, concatenate_datasets
from trl.data_utils import is_conversational
from trl.rewards import accuracy_reward, get_soft_overlong_punishment, reasoning_accuracy_reward, think_format_reward

from autotune.core.plan import TrainingPlan
from autotune.core.workload import NO_DATA, Rollouts
from autotune.errors import AutotuneError, InputError
from autotune.step.images.sizes import image_column
from autotune.step.images.tokens import IMAGE_COLUMNS, check_every_row_pictured, image_elements, with_prompts
from autotune.step.rows import Counts, Flags, RowSizes
from autotune.step.trainers.base import Adapter
from autotune.trainers.prompts import COMPLETION, NO_REWARD, PROMPT

WANTED = "autotune_completion_tokens"
"""The column with the tokens that each completion of a row is to have."""
_SEED = 0
# The names and settings of trl/scripts/grpo.py.
_OWN_REWARDS: dict[str, Callable[..., Any]] = {
    "accuracy_reward": accuracy_reward,
    "reasoning_accuracy_reward": reasoning_accuracy_reward,
    "think_format_reward": think_format_reward,
    "get_soft_overlong_punishment": get_soft_overlong_punishment(max_completion_len=1280, soft_punish_cache=256),
}
_OF_MESSAGES = _OWN_REWARDS.keys() - {"get_soft_overlong_punishment"}
"""Those that read messages, as completions are only where prompts are (``completion[0]["content"]``)."""

_GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
_HELD_BACK = ("prompt", "completion")
"""What TRL passes to a reward function beside the columns of the dataset, and columns that it does not pass
(``GRPOTrainer._calculate_rewards``)."""


class RewardError(AutotuneError):
    """A reward function of the user's own failed."""


class Prompted(Adapter):
    """Rows of a prompt, with all columns that a reward function may read.

    A probe and a trace train on rows that say how many tokens each of their completions is to have: the model generates
    until the longest of them is done, and the others are cut.

    Class attributes:
        completions_per_row: completions that a row of a micro-batch has.
    """

    columns = (PROMPT, COMPLETION)
    completions_per_row: ClassVar[int] = 1
    every_row_pictured: ClassVar[bool] = False

    @property
    def tokenizing(self) -> Mapping[str, object]:
        """Return arguments for a trainer that only tokenises."""
        return {"gradient_checkpointing": False, "bf16": False, "use_cpu": True}

    @abstractmethod
    def prompt_ids(self, trainer: Any, prompts: Sequence[Any]) -> Sequence[Sequence[int]]:
        """Return the tokens of prompts, text or messages, as the trainer makes them."""

    @abstractmethod
    def most_tokens(self, trainer: Any) -> int:
        """Return the most tokens of a completion."""

    def tokenized(self, trainer: Any, rollouts: Rollouts, dataset: str) -> Dataset:
        """Return all columns, with the tokens of prompts and of the completions that a column holds.

        Raises:
            InputError: the column or a reward function is missing, or the function asks for a column that is, or for
                messages where prompts are text; or TRL refuses the images of a row.
        """
        tokenizer, known = trainer._tokenizer, trainer.train_dataset.column_names
        for name in rollouts.rewards:
            reward_function(name)
            if dataset != NO_DATA:
                check_columns(name, known)
                _check_messages(name, trainer.train_dataset)
        if rollouts.column is not None and rollouts.column not in known:
            raise InputError(
                f"The dataset has no column {rollouts.column!r}, which was named for the length of completions.",
                hint=f"It has {', '.join(known)}; a number of tokens can be given instead.",
            )

        def completions(batch: Mapping[str, list[Any]], rows: int) -> list[list[int]]:
            texts = [str(text) for text in batch[rollouts.column]] if rollouts.column else []
            return list(tokenizer(text=texts)["input_ids"]) if texts else [[]] * rows

        if image_column(trainer.train_dataset) is not None:
            rows = with_prompts(
                trainer, lambda row: {COMPLETION: completions({name: [row[name]] for name in row}, 1)[0]}, dataset
            )
            if self.every_row_pictured:
                check_every_row_pictured(rows, dataset)
            return rows

        def tokens(batch: dict[str, list[Any]]) -> dict[str, list[list[int]]]:
            prompts = self.prompt_ids(trainer, batch["prompt"])
            return {PROMPT: [list(ids) for ids in prompts], COMPLETION: completions(batch, len(prompts))}

        return trainer.train_dataset.map(tokens, batched=True)

    def trainable(self, rows: Dataset) -> Counts:
        """Return the tokens of prompts: those of completions depend on the plan."""
        return np.asarray(self.lengths(rows)[:, 0])

    def completions(self, rows: Dataset) -> Counts | None:
        """Return the tokens of known completions."""
        known = np.asarray(self.lengths(rows)[:, 1])
        return known if known.any() else None

    def arguments(self, plan: TrainingPlan) -> Mapping[str, Any]:
        """Return the reward functions of a plan, or a free one where it names none.

        Raises:
            InputError: there is none of a name.
        """
        return {"reward_funcs": [_called(name) for name in plan.rewards or (NO_REWARD,)]}

    def sizes(self, trainer: Any) -> RowSizes:
        """Return the sizes of prompts, and of the completions that are added."""
        rows, most, count = trainer.train_dataset, self.most_tokens(trainer), self.completions_per_row
        known, prompts = self.completions(rows), self.lengths(rows)[:, :1]
        typical = np.full(len(rows), assumed_tokens(trainer.plan)) if known is None else known
        # Completions of a row differ in length as those of any two rows do.
        shuffle = np.random.default_rng(_SEED).permutation
        drawn = np.stack([typical, *(shuffle(typical) for _ in range(count - 1))], axis=1)
        generated = np.minimum(np.maximum(drawn, 1), most)
        return RowSizes(
            np.repeat(prompts, count, axis=1),
            prompts[:, 0],
            generated=generated,
            most_generated=most,
            image_elements=image_elements(rows),
        )

    def arranged(self, trainer: Any, order: Counts, worst: Flags) -> Dataset:
        """Return prompts with the lengths of their completions: the largest in the worst micro-batches.

        All but one of these completions are a token shorter, so that each micro-batch has a mask, whichever rows it
        gets.
        """
        sizes, rows = self.sizes(trainer), trainer.train_dataset
        assert sizes.generated is not None
        shorter = np.full_like(sizes.generated, max(1, sizes.most_generated - 1))
        longest = shorter.copy()
        longest[:, 0] = sizes.most_generated
        # Reward functions get all columns that are left.
        rows = rows.remove_columns([name for name in (COMPLETION, *IMAGE_COLUMNS) if name in rows.column_names])
        # A column that is added to selected rows copies each of them as often as it is selected, with its images.
        ends = np.arange(0, sizes.generated.size + 1, self.completions_per_row, dtype=np.int32)
        lengths = (pa.ListArray.from_arrays(ends, each.ravel()) for each in (sizes.generated, shorter, longest))
        every = concatenate_datasets([rows.add_column(WANTED, wanted) for wanted in lengths])
        place = np.zeros_like(order)
        place[worst], place[worst, 0] = 1, 2
        return every.select((order + place * len(rows)).ravel(), keep_in_memory=True)

    def synthetic(self, rows: Sequence[tuple[int, ...]], plan: TrainingPlan, trainable: float) -> Dataset:
        """Return prompts of one repeated token, with completions of the given lengths."""
        return super().synthetic(rows, plan, trainable).add_column("prompt", ["a"] * len(rows))


def reward_function(name: str) -> Callable[..., Any]:
    """Return the reward function of a name as TRL's scripts do: one of TRL's own, or the dotted path of a function.

    Raises:
        InputError: there is none of that name, or its module cannot be imported.
    """
    if name in _OWN_REWARDS:
        return _OWN_REWARDS[name]
    module, _, function = name.rpartition(".")
    hint = f"Give a dotted path from here, such as my_rewards.length, or one of {', '.join(_OWN_REWARDS)}."
    if not module:
        raise InputError(f"There is no reward function {name!r} (reward_funcs).", hint=hint)
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module), function, None)
    except (Exception, SystemExit) as error:
        raise InputError(f"The module of reward_funcs' {name} cannot be imported: {error}", hint=hint) from error
    if not callable(found):
        raise InputError(f"{module} has no function {function}, which reward_funcs names.", hint=hint)
    reward: Callable[..., Any] = found
    return reward


def check_columns(name: str, columns: Collection[str]) -> None:
    """Check that TRL can call a reward function: it passes the columns of the dataset by their names.

    Raises:
        InputError: the function needs another argument; or there is none of that name.
    """
    given = {*_GIVEN, *columns}.difference(_HELD_BACK)
    needed = [
        parameter.name
        for parameter in inspect.signature(reward_function(name)).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    missing = [needs for needs in needed if needs not in given]
    if missing:
        raise InputError(
            f"The reward function {name} (reward_funcs) needs {', '.join(missing)}, and TRL has no column of that name"
            f" to pass: the dataset has {', '.join(columns)}.",
            hint="Rename a column of the dataset, or name a function that reads those that there are.",
        )


def _check_messages(name: str, rows: Dataset) -> None:
    """Check that a reward function of TRL's own gets the messages that it reads.

    Raises:
        InputError: prompts are text, and so completions are.
    """
    if name in _OF_MESSAGES and not is_conversational({"prompt": rows[:1]["prompt"][0]}):
        raise InputError(
            f"The reward function {name} (reward_funcs) reads messages, and completions are text where prompts are:"
            " TRL ends at the first step.",
            hint='Make each prompt a list of messages, such as [{"role": "user", "content": …}].',
        )


def _called(name: str) -> Callable[..., Any]:
    """Return the reward function of a name, which is named in the error where a function of the user's own fails.

    Raises:
        InputError: there is none of that name.
    """
    function = reward_function(name)
    if name in _OWN_REWARDS:
        return function

    @wraps(function)
    def called(**columns: Any) -> Any:
        with _blamed(name):
            return function(**columns)

    @wraps(function)
    async def awaited(**columns: Any) -> Any:
        with _blamed(name):
            return await function(**columns)

    # As TRL finds out which functions it has to await.
    is_awaited = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
    return awaited if is_awaited else called


@contextmanager
def _blamed(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise RewardError(f"Your reward function {name} failed: {type(error).__name__}: {error}") from error


def assumed_tokens(plan: TrainingPlan) -> int:
    """Return the tokens of a completion whose length is not known."""
    return round(plan.completions.mean) if plan.completions else 1


def require_generated(tokens: int, wanted: int) -> None:
    """Check that completions have their intended length, before they are cut.

    Raises:
        RuntimeError: they are shorter, so that what runs is not what is to be measured.
    """
    if tokens < wanted:
        raise RuntimeError(f"the model generated {tokens} tokens, and {wanted} were asked for")
