"""Adapter base of TRL's trainers that generate completions for several micro-batches at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar
from unittest import mock

import torch
from datasets import Dataset
from torch.utils.data import SequentialSampler
from trl.generation import vllm_generation

from autotune.core.plan import TrainingPlan
from autotune.step.images.sizes import COLUMNS
from autotune.step.rows import Counts
from autotune.step.trainers.base import Adapter, Drawing
from autotune.step.trainers.prompts import (
    COMPLETION_TOKENS,
    NO_TOKEN,
    Prompted,
    default_completion_tokens,
    require_generated,
)
from autotune.step.trainers.vllm import FixedCompletions, set_completion_tokens, with_random_weights
from autotune.trainers.prompts import GENERATION, PROMPT, STAND_IN_SERVER
from autotune.virtual import UnsupportedError, is_tracing

_Trl: Any = object
"""Placeholder for TRL's trainer, the next base class."""
_CONTINUOUS_BATCHING = (
    "continuous batching (use_transformers_continuous_batching) is not planned, since its cache takes most of the "
    "memory that is free"
)


class OnTokenizedPrompts(_Trl):
    """TRL's trainer on tokenised prompts with given lengths of their completions.

    The model generates until the longest completion has its length; the others are cut. If only some micro-batches of a
    step are run, TRL counts the skipped ones too, so that it generates at the same steps as in whole training. If a
    step has several generations, each micro-batch that is run follows one, and the second finds gradients, as in
    training.

    Attributes:
        plan: the training plan.
        adapter: the adapter of the trainer.
        skipped_micro_batches: micro-batches of a step that are not run.
        trained: places of the rows of a generation batch, in the order in which they are trained; None: that in which
            they are generated.
    """

    plan: TrainingPlan
    adapter: Adapter
    skipped_micro_batches = 0
    trained: Counts | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        module = self.adapter.module
        connection = FixedCompletions if self.plan.args.get("vllm_mode") == STAND_IN_SERVER else module.VLLMGeneration
        with mock.patch.object(module, "VLLMGeneration", connection), with_random_weights(vllm_generation):
            super().__init__(*args, **kwargs)
        # TRL loads tokenizers with left padding; this one was passed in.
        self._tokenizer.padding_side = "left"
        self._has_images = False
        self._prompt_ids: list[list[int]] = []
        self._completion_tokens: list[int] = []

    def _get_train_sampler(self, dataset: Dataset | None = None) -> Any:
        if self.args.train_sampling_strategy != "sequential":
            return super()._get_train_sampler(dataset)
        return SequentialSampler(self.train_dataset if dataset is None else dataset)

    def _get_eval_sampler(self, dataset: Dataset) -> Any:
        if self.args.train_sampling_strategy != "sequential":
            return super()._get_eval_sampler(dataset)
        return SequentialSampler(dataset)

    def _prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        shuffle = self.adapter.module.shuffle_sequence_dict

        def permutation(count: int) -> torch.Tensor:
            return torch.arange(count) if self.trained is None else torch.from_numpy(self.trained)

        def shuffle_in_order(batch: Any) -> Any:
            with mock.patch.object(torch, "randperm", permutation):
                return shuffle(batch)

        # TRL shuffles the completions of a generation batch; here, the order of rows assigns them to micro-batches.
        with mock.patch.object(self.adapter.module, "shuffle_sequence_dict", shuffle_in_order):
            return super()._prepare_inputs(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Train on a micro-batch, then count the skipped ones: after a step's last, or up to the next generation."""
        loss = super().training_step(*args, **kwargs)
        in_part = self.args.gradient_accumulation_steps < self.plan.micro_batches
        if in_part and self.plan.generates_within_steps:
            self._step += -self._step % self.plan.micro_batches_per_generation
        elif self.accelerator.sync_gradients:
            self._step += self.skipped_micro_batches
        return loss

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Any:
        rows = [dict(row) for row in inputs]
        self._has_images = any(name in rows[0] for name in COLUMNS)
        self._prompt_ids = [row.pop(PROMPT) for row in rows]
        self._completion_tokens = [tokens for row in rows for tokens in row.pop(COMPLETION_TOKENS)]
        with self.whole_steps():
            return super()._generate_and_score_completions(rows)

    def whole_steps(self) -> AbstractContextManager[object]:
        """Make TRL count all micro-batches of a step, of which only some are run."""
        return mock.patch.object(self.args, "gradient_accumulation_steps", self.plan.micro_batches)

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        if self._has_images:
            # Images are processed together with the prompts.
            return super()._tokenize_prompts(prompts)
        return self._prompt_ids, None, {}

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        longest = max(self._completion_tokens)
        if self.use_vllm:
            set_completion_tokens(self.vllm_generation, longest)
        else:
            self.generation_config.max_new_tokens, self.generation_config.eos_token_id = longest, NO_TOKEN
            if getattr(self, "use_transformers_continuous_batching", False):
                if is_tracing():
                    raise UnsupportedError(_CONTINUOUS_BATCHING)
                # Continuous batching takes only -1 for no EOS token (`init_continuous_batching`).
                self.generation_config.eos_token_id = -1
        # TRL cuts completions after the first of these.
        with mock.patch.object(self, "eos_token_ids", [NO_TOKEN]):
            result = super()._generate_single_turn(*args, **kwargs)
        # GRPO also returns the sampler's log-probabilities, if there are any; RLOO returns completions alone.
        completions, *logprobs = result if isinstance(result, tuple) else (result,)
        for row, tokens in zip(completions, self._completion_tokens, strict=True):
            require_generated(len(row), tokens)
        truncated = [self._truncate(rows) for rows in (completions, *logprobs)]
        if getattr(self, "mask_truncated_completions", False):
            # TRL masks completions without a final EOS token; in training, completions of any length may have one.
            truncated[0] = [[*row[:-1], self.eos_token_ids[0]] for row in truncated[0] or ()]
        return tuple(truncated) if isinstance(result, tuple) else truncated[0]

    def _truncate(self, rows: list[list[Any]] | None) -> list[list[Any]] | None:
        return rows and [row[:tokens] for row, tokens in zip(rows, self._completion_tokens, strict=True)]


class Generating(Prompted):
    """Adapter base for ``autotune.trainers.generating``."""

    generating = "_generate_and_score_completions"
    methods: ClassVar[Mapping[str, str]] = {GENERATION: "_generate_single_turn"}

    def prompt_ids(self, trainer: Any, prompts: Sequence[Any]) -> Sequence[Sequence[int]]:
        """Return the tokens of prompts."""
        ids: Sequence[Sequence[int]] = trainer._tokenize_prompts(prompts)[0]
        return ids

    def max_completion_tokens(self, trainer: Any) -> int:
        """Return the maximum tokens of a completion."""
        return int(trainer.max_completion_length)

    def yielded(self, trainer: Any, rows: Counts, trained: Counts) -> Counts:
        """Return the rows unchanged: they are put in order where TRL shuffles them, after its passes over all of them.

        A trace runs the first chunk of a pass, which has to be the widest, too.
        """
        trainer.trained = trained
        return rows

    def drawing(self, trainer: Any) -> Drawing:
        """Return the drawing of the prompts of all micro-batches of a step at once."""
        micro_batches = trainer.plan.micro_batches
        return Drawing(trainer.args.per_device_train_batch_size * micro_batches, uses=micro_batches)

    def rows_and_tokens(self, trainer: Any, batch: Any) -> tuple[int, int]:
        """Return the rows and the padded tokens of prompts and completions of a micro-batch."""
        rows, collation = trainer.args.per_device_train_batch_size, self.collation(trainer)
        default = [min(default_completion_tokens(trainer.plan), trainer.max_completion_length)]
        widest = max(len(row[PROMPT]) for row in batch), max(max(row.get(COMPLETION_TOKENS, default)) for row in batch)
        return rows, rows * sum(-(-tokens // collation.multiple) * collation.multiple for tokens in widest)
