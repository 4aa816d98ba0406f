"""The child's side of TRL's trainers that generate completions for several micro-batches at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, ClassVar
from unittest import mock

from datasets import Dataset
from torch.utils.data import SequentialSampler
from trl.generation import vllm_generation

from autotune.core.plan import TrainingPlan
from autotune.step.images.sizes import COLUMNS
from autotune.step.trainers.base import Drawing
from autotune.step.trainers.prompts import WANTED, Prompted, assumed_tokens, require_generated
from autotune.step.trainers.vllm import GivenCompletions, make_long, without_weights
from autotune.trainers.prompts import GENERATION, PROMPT, STAND_IN
from autotune.virtual import UnsupportedError, is_tracing

_Trl: Any = object
"""Placeholder for TRL's trainer, the next base class."""
_BATCHED = (
    "continuous batching (use_transformers_continuous_batching) is not planned, since its cache takes most of the "
    "memory that is free"
)


class OnTokenizedPrompts(_Trl):
    """TRL's trainer on tokenised prompts with the lengths of their completions.

    Each row says how many tokens its completion is to have: the model generates until the longest of them is done, and
    the others are cut. Where only some micro-batches of a step are run, TRL's count of micro-batches goes on as if all
    were, and its decisions are those of whole steps.

    Attributes:
        plan: what is trained.
        module: the module of TRL's trainer.
        left_out: micro-batches of a step that are not run.
    """

    plan: TrainingPlan
    module: ModuleType
    left_out = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = GivenCompletions if self.plan.args.get("vllm_mode") == STAND_IN else self.module.VLLMGeneration
        with mock.patch.object(self.module, "VLLMGeneration", given), without_weights(vllm_generation):
            super().__init__(*args, **kwargs)
        # As TRL loads a tokenizer where none is given.
        self._tokenizer.padding_side = "left"
        self._trained = 0
        self._pictured = False
        self._prompt_ids: list[list[int]] = []
        self._wanted: list[int] = []

    def _get_train_sampler(self, dataset: Dataset | None = None) -> Any:
        if self.args.train_sampling_strategy != "sequential":
            return super()._get_train_sampler(dataset)
        return SequentialSampler(self.train_dataset if dataset is None else dataset)

    def _get_eval_sampler(self, dataset: Dataset) -> Any:
        if self.args.train_sampling_strategy != "sequential":
            return super()._get_eval_sampler(dataset)
        return SequentialSampler(dataset)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Train on a micro-batch, and count those that are left out after the last of a step."""
        loss = super().training_step(*args, **kwargs)
        self._trained += 1
        if self._trained % self.args.gradient_accumulation_steps == 0:
            self._step += self.left_out
        return loss

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Any:
        rows = [dict(row) for row in inputs]
        self._pictured = any(name in rows[0] for name in COLUMNS)
        self._prompt_ids = [row.pop(PROMPT) for row in rows]
        self._wanted = [tokens for row in rows for tokens in row.pop(WANTED)]
        with self.whole_steps():
            return super()._generate_and_score_completions(rows)

    def whole_steps(self) -> AbstractContextManager[object]:
        """Make TRL count all micro-batches of a step, of which only some are run."""
        return mock.patch.object(self.args, "gradient_accumulation_steps", self.plan.micro_batches)

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        if self._pictured:
            # Images are processed together with the prompts.
            return super()._tokenize_prompts(prompts)
        return self._prompt_ids, None, {}

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        longest = max(self._wanted)
        if self.use_vllm:
            make_long(self.vllm_generation, longest)
        else:
            self.generation_config.max_new_tokens = self.generation_config.min_new_tokens = longest
            if getattr(self, "use_transformers_continuous_batching", False):
                if is_tracing():
                    raise UnsupportedError(_BATCHED)
                # It drops the processor of `min_new_tokens`, and takes -1 for no end (`init_continuous_batching`).
                self.generation_config.eos_token_id = -1
        made = super()._generate_single_turn(*args, **kwargs)
        # GRPO returns beside the completions the sampler's log-probabilities, if it has any; RLOO does not.
        completions, *beside = made if isinstance(made, tuple) else (made,)
        for row, tokens in zip(completions, self._wanted, strict=True):
            require_generated(len(row), tokens)
        cut = [self._cut(rows) for rows in (completions, *beside)]
        if getattr(self, "mask_truncated_completions", False):
            # TRL masks completions that do not end by themselves. Those that do may be as long.
            cut[0] = [[*row[:-1], self.eos_token_ids[0]] for row in cut[0] or ()]
        return tuple(cut) if isinstance(made, tuple) else cut[0]

    def _cut(self, rows: list[list[Any]] | None) -> list[list[Any]] | None:
        return rows and [row[:tokens] for row, tokens in zip(rows, self._wanted, strict=True)]


class Generating(Prompted):
    """The child's side of ``autotune.trainers.generating``."""

    generating = "_generate_and_score_completions"
    methods: ClassVar[Mapping[str, str]] = {GENERATION: "_generate_single_turn"}

    def prompt_ids(self, trainer: Any, prompts: Sequence[Any]) -> Sequence[Sequence[int]]:
        """Return the tokens of prompts."""
        ids: Sequence[Sequence[int]] = trainer._tokenize_prompts(prompts)[0]
        return ids

    def most_tokens(self, trainer: Any) -> int:
        """Return the most tokens of a completion."""
        return int(trainer.max_completion_length)

    def drawing(self, trainer: Any) -> Drawing:
        """Return that the prompts of all micro-batches of a step are drawn at once."""
        micro_batches = trainer.plan.micro_batches
        return Drawing(trainer.args.per_device_train_batch_size * micro_batches, uses=micro_batches)

    def loaded(self, trainer: Any, batch: Any) -> tuple[int, int]:
        """Return rows and tokens of a micro-batch that is trained on the completions of a generation batch."""
        rows, collation = trainer.args.per_device_train_batch_size, self.collation(trainer)
        assumed = [min(assumed_tokens(trainer.plan), trainer.max_completion_length)]
        widths = max(len(row[PROMPT]) for row in batch), max(max(row.get(WANTED, assumed)) for row in batch)
        return rows, rows * sum(-(-tokens // collation.multiple) * collation.multiple for tokens in widths)
