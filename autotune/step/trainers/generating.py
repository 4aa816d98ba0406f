"""What TRL's trainers that generate their completions share on the child's side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import torch
from datasets import Dataset
from torch.utils.data import SequentialSampler

from autotune.core.plan import TrainingPlan
from autotune.core.workload import Rollouts
from autotune.step.rows import Counts, Flags, RowSizes, column_lengths
from autotune.step.trainers.base import Adapter, Drawing, MakeModel
from autotune.step.trainers.rewards import reward_function
from autotune.trainers.generating import (
    GENERATION,
    NO_REWARD,
    OLD_PASS,
    REFERENCE_PASS,
    SCORING,
    steps_per_generation,
)
from autotune.trainers.geometry import micro_batches_of
from autotune.virtual.generation import short_generation

_Trl: Any = object
"""Stands for TRL's trainer, which comes after in the order of bases."""
_TOKEN = 5
PROMPT, COMPLETION = "prompt_ids", "completion_ids"
_WANTED = "autotune_completion_tokens"
# Chunks of a pass over a generation batch that are run, where steps are not run whole.
_RUN_CHUNKS = 2


class _OnTokenizedPrompts(_Trl):
    """TRL's trainer on tokenised prompts with the lengths of their completions.

    Each row says how many tokens its completion is to have: the model generates until the longest of them is done, and
    the others are cut. Where only some micro-batches of a step are run, TRL's count of micro-batches goes on as if all
    were, and its decisions are those of whole steps.

    Attributes:
        plan: what is trained.
        module: the module of TRL's trainer, whose reference model is built like the trained one.
        left_out: micro-batches of a step that are not run.
        run_chunks: most chunks of a pass over a generation batch that are run, or None for all.
    """

    plan: TrainingPlan
    module: ModuleType
    left_out = 0
    run_chunks: int | None = None

    def __init__(self, *args: Any, make_reference: MakeModel | None = None, **kwargs: Any) -> None:
        with _instead(self.module, "create_model_from_path", make_reference and (lambda *_, **__: make_reference())):
            super().__init__(*args, **kwargs)
        self._trained = 0
        self._prompt_ids: list[list[int]] = []
        self._wanted: list[int] = []

    def _get_train_sampler(self, dataset: Dataset | None = None) -> Any:
        if self.args.train_sampling_strategy != "sequential":
            return super()._get_train_sampler(dataset)
        return SequentialSampler(self.train_dataset if dataset is None else dataset)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        self._trained += 1
        if self._trained % self.args.gradient_accumulation_steps == 0:
            self._step += self.left_out
        return loss

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Any:
        rows = [dict(row) for row in inputs]
        self._prompt_ids = [row.pop(PROMPT) for row in rows]
        self._wanted = [row.pop(_WANTED) for row in rows]
        run, self.args.gradient_accumulation_steps = self.args.gradient_accumulation_steps, micro_batches_of(self.plan)
        self._passes = iter(self.passes)
        try:
            return super()._generate_and_score_completions(rows)
        finally:
            self.args.gradient_accumulation_steps = run

    @property
    def passes(self) -> tuple[str, ...]:
        """The passes over a generation batch, in TRL's order."""
        old = (OLD_PASS,) if compares_with_old(self.plan) else ()
        return (*old, *((REFERENCE_PASS,) if self.beta else ()))

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        return self._prompt_ids, None, {}

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        longest = max(self._wanted)
        self.generation_config.max_new_tokens = self.generation_config.min_new_tokens = longest
        with short_generation():
            made = super()._generate_single_turn(*args, **kwargs)
        # GRPO returns log-probabilities of the sampler beside the completions, RLOO does not.
        completions, *beside = made if isinstance(made, tuple) else (made,)
        cut = [ids[:tokens] for ids, tokens in zip(completions, self._wanted, strict=True)]
        return (cut, *beside) if beside else cut

    def _get_per_token_logps_and_entropies(
        self, model: Any, ids: Any, mask: Any, kept: int, batch_size: int | None = None, **kwargs: Any
    ) -> Any:
        # Only the passes over a generation batch go through it in chunks.
        if batch_size is None or torch.is_grad_enabled():
            return super()._get_per_token_logps_and_entropies(model, ids, mask, kept, batch_size, **kwargs)
        run = self.old_pass if next(self._passes) == OLD_PASS else self.reference_pass
        return run(model, ids, mask, kept, batch_size, **kwargs)

    def old_pass(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the log-probabilities of the model before the update."""
        return self._pass(*args, **kwargs)

    def reference_pass(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the log-probabilities of the reference."""
        return self._pass(*args, **kwargs)

    def _pass(self, model: Any, ids: Any, mask: Any, kept: int, batch_size: int, **kwargs: Any) -> Any:
        run = len(ids) if self.run_chunks is None else min(len(ids), self.run_chunks * batch_size)
        found, *others = super()._get_per_token_logps_and_entropies(
            model, ids[:run], mask[:run], kept, batch_size, **kwargs
        )
        missing = found.new_zeros(len(ids) - run, *found.shape[1:])
        return (torch.cat([found, missing]) if run < len(ids) else found, *others)

    @property
    def assumed_tokens(self) -> int:
        """Tokens of a completion whose length is not known."""
        return round(self.plan.completions.mean) if self.plan.completions else 1


class Generating(Adapter):
    """Rows of a prompt, with all columns that a reward function may read.

    Class attributes:
        module: the module of TRL's trainer.
    """

    module: ClassVar[ModuleType]
    columns = (PROMPT, COMPLETION)
    generating = "_generate_and_score_completions"
    methods: ClassVar[Mapping[str, str]] = {
        GENERATION: "_generate_single_turn",
        OLD_PASS: "old_pass",
        REFERENCE_PASS: "reference_pass",
        SCORING: "_calculate_rewards",
    }

    @property
    def tokenizing(self) -> Mapping[str, object]:
        """Return arguments for a trainer that only tokenises."""
        return {"gradient_checkpointing": False, "bf16": False, "use_cpu": True, "beta": 0.0}

    def derived(self, plan: TrainingPlan) -> Mapping[str, object]:
        """Return the micro-batches of a generation batch."""
        return {"steps_per_generation": steps_per_generation(plan)}

    def tokenized(self, trainer: Any, rollouts: Rollouts) -> Dataset:
        """Return all columns, with the tokens of prompts and of the completions that a column holds."""
        tokenizer = trainer._tokenizer

        def tokens(batch: dict[str, list[Any]]) -> dict[str, list[list[int]]]:
            prompts, _, _ = trainer._tokenize_prompts(batch["prompt"])
            texts = batch[rollouts.column] if rollouts.column else None
            completions = tokenizer(text=[str(text) for text in texts])["input_ids"] if texts else [[]] * len(prompts)
            return {PROMPT: [list(ids) for ids in prompts], COMPLETION: completions}

        return trainer.train_dataset.map(tokens, batched=True)

    def lengths(self, rows: Dataset) -> Counts:
        """Return the tokens of prompts and of known completions."""
        return column_lengths(rows, self.columns)

    def trainable(self, rows: Dataset) -> Counts:
        """Return the tokens of prompts: those of completions depend on the plan."""
        return np.asarray(self.lengths(rows)[:, 0])

    def completions(self, rows: Dataset) -> Counts | None:
        """Return the tokens of known completions."""
        known = np.asarray(self.lengths(rows)[:, 1])
        return known if known.any() else None

    def beside_model(self, plan: TrainingPlan | None, make_model: MakeModel) -> Mapping[str, Any]:
        """Return the reward functions, and what builds the reference model where TRL would load it."""
        if plan is None:
            return {"reward_funcs": [reward_function(NO_REWARD)]}
        return {"reward_funcs": [reward_function(name) for name in plan.rewards], "make_reference": make_model}

    def trainer_class(self, plan: TrainingPlan) -> type[Any]:
        """Return a subclass that takes tokenised prompts."""
        return type(self.trainer.__name__, (_OnTokenizedPrompts, self.trainer), {"plan": plan, "module": self.module})

    def drawing(self, trainer: Any) -> Drawing:
        """Return that the prompts of a generation batch are drawn at once, and yielded once for each completion."""
        copies = trainer.num_generations
        drawn = trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation
        return Drawing(max(1, drawn // copies), copies, trainer.args.steps_per_generation * trainer.num_iterations)

    def sizes(self, trainer: Any) -> RowSizes:
        """Return the sizes of prompts, and of the completions that are added."""
        rows, most = trainer.train_dataset, trainer.max_completion_length
        known = self.completions(rows)
        prompts = self.lengths(rows)[:, :1]
        assumed = np.full(len(rows), trainer.assumed_tokens) if known is None else known
        generated = np.minimum(np.maximum(assumed, 1), most)
        return RowSizes(prompts, prompts[:, 0], generated=generated, most_generated=most)

    def arranged(self, trainer: Any, order: Counts, worst: Flags) -> Dataset:
        """Return prompts with the lengths of their completions: the largest in the worst micro-batches.

        All but one of these completions are a token shorter, so that each micro-batch has a mask, whichever rows it
        gets.
        """
        sizes = self.sizes(trainer)
        assert sizes.generated is not None
        wanted = sizes.generated[order]
        largest = np.full(order.shape[1], max(1, sizes.most_generated - 1))
        largest[0] = sizes.most_generated
        wanted[worst] = largest
        rows = trainer.train_dataset.select(order.ravel(), keep_in_memory=True).remove_columns([COMPLETION])
        return rows.add_column(_WANTED, wanted.ravel().tolist())

    def leave_out(self, trainer: Any, micro_batches: int) -> None:
        """Make the trainer count micro-batches that are left out of each step."""
        trainer.left_out = micro_batches
        trainer.run_chunks = _RUN_CHUNKS if micro_batches else None

    def run_share(self, trainer: Any) -> Mapping[str, float]:
        """Return the share of chunks that the passes over a generation batch run."""
        chunks = trainer.args.steps_per_generation
        share = 1.0 if trainer.run_chunks is None else min(1.0, trainer.run_chunks / chunks)
        return dict.fromkeys(trainer.passes, share)

    def collated(self, inputs: Any) -> tuple[int, int]:
        """Return rows and tokens of the ids of prompts and completions."""
        rows, prompt = inputs[PROMPT].shape
        return rows, rows * (prompt + inputs[COMPLETION].shape[1])

    def loaded(self, trainer: Any, batch: Any) -> tuple[int, int]:
        """Return rows and tokens of a micro-batch that is trained on the completions of a generation batch."""
        rows, collation = trainer.args.per_device_train_batch_size, self.collation(trainer)
        assumed = min(trainer.assumed_tokens, trainer.max_completion_length)
        widths = max(len(row[PROMPT]) for row in batch), max(row.get(_WANTED, assumed) for row in batch)
        return rows, rows * sum(-(-tokens // collation.multiple) * collation.multiple for tokens in widths)

    def synthetic(
        self, rows: Sequence[tuple[int, ...]], plan: TrainingPlan, arguments: Any, trainable: float
    ) -> Dataset:
        """Return prompts of one repeated token, with completions of the given lengths."""
        return Dataset.from_dict({
            "prompt": ["a"] * len(rows),
            PROMPT: [[_TOKEN] * prompt for prompt, _ in rows],
            COMPLETION: [[_TOKEN] * completion for _, completion in rows],
        })  # fmt: skip


def compares_with_old(plan: TrainingPlan) -> bool:
    """Return whether a plan's specification has the pass for old log-probabilities."""
    from autotune.trainers import find_trainer

    return OLD_PASS in find_trainer(plan.trainer).program(plan).names


@contextmanager
def _instead(module: ModuleType, name: str, value: Callable[..., Any] | None) -> Iterator[None]:
    """Replace a function of a module for the duration of the context; None: leave it."""
    kept = getattr(module, name)
    setattr(module, name, value or kept)
    try:
        yield
    finally:
        setattr(module, name, kept)
