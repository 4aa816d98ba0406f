"""What TRL's trainers that generate their completions share on the child's side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar

import torch
from datasets import Dataset
from torch.utils.data import SequentialSampler
from trl.generation import vllm_generation

from autotune.core.plan import TrainingPlan
from autotune.step.trainers.base import Drawing, MakeModel
from autotune.step.trainers.prompts import WANTED, Prompted, assumed_tokens, instead, require_generated
from autotune.step.trainers.vllm import GivenCompletions, make_long, without_weights
from autotune.trainers.generating import OLD_PASS, steps_per_generation
from autotune.trainers.geometry import micro_batches_of
from autotune.trainers.prompts import GENERATION, PROMPT, REFERENCE_PASS, SCORING, STAND_IN

_Trl: Any = object
"""Stands for TRL's trainer, which comes after in the order of bases."""
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
        given = GivenCompletions if self.plan.args.get("vllm_mode") == STAND_IN else None
        reference = make_reference and (lambda *_, **__: make_reference())
        with (
            instead(self.module, "create_model_from_path", reference),
            instead(self.module, "VLLMGeneration", given),
            without_weights(vllm_generation),
        ):
            super().__init__(*args, **kwargs)
        self._trained = 0
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
        loss = super().training_step(*args, **kwargs)
        self._trained += 1
        if self._trained % self.args.gradient_accumulation_steps == 0:
            self._step += self.left_out
        return loss

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Any:
        rows = [dict(row) for row in inputs]
        self._prompt_ids = [row.pop(PROMPT) for row in rows]
        self._wanted = [tokens for row in rows for tokens in row.pop(WANTED)]
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
        if self.use_vllm:
            make_long(self.vllm_generation, longest)
        else:
            self.generation_config.max_new_tokens = self.generation_config.min_new_tokens = longest
        made = super()._generate_single_turn(*args, **kwargs)
        # GRPO returns beside the completions the sampler's log-probabilities, if it has any; RLOO does not.
        completions, *beside = made if isinstance(made, tuple) else (made,)
        require_generated(max(map(len, completions)), longest)
        cut = [self._cut(rows) for rows in (completions, *beside)]
        return tuple(cut) if isinstance(made, tuple) else cut[0]

    def _cut(self, rows: list[list[Any]] | None) -> list[list[Any]] | None:
        return rows and [row[:tokens] for row, tokens in zip(rows, self._wanted, strict=True)]

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


class Generating(Prompted):
    """The child's side of ``autotune.trainers.generating``.

    Class attributes:
        module: the module of TRL's trainer.
    """

    module: ClassVar[ModuleType]
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

    def prompt_ids(self, trainer: Any, prompts: Sequence[Any]) -> Sequence[Sequence[int]]:
        """Return the tokens of prompts."""
        ids: Sequence[Sequence[int]] = trainer._tokenize_prompts(prompts)[0]
        return ids

    def most_tokens(self, trainer: Any) -> int:
        """Return the most tokens of a completion."""
        return int(trainer.max_completion_length)

    def beside_model(self, plan: TrainingPlan | None, make_model: MakeModel) -> Mapping[str, Any]:
        """Return the reward functions, and what builds the reference model where TRL would load it."""
        rewards = super().beside_model(plan, make_model)
        return rewards if plan is None else {**rewards, "make_reference": make_model}

    def trainer_class(self, plan: TrainingPlan) -> type[Any]:
        """Return a subclass that takes tokenised prompts."""
        return type(self.trainer.__name__, (_OnTokenizedPrompts, self.trainer), {"plan": plan, "module": self.module})

    def drawing(self, trainer: Any) -> Drawing:
        """Return that the prompts of a generation batch are drawn at once, and yielded once for each completion."""
        copies = trainer.num_generations
        drawn = trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation
        return Drawing(max(1, drawn // copies), copies, trainer.args.steps_per_generation * trainer.num_iterations)

    def evaluation_drawing(self, trainer: Any) -> Drawing:
        """Return that each prompt is yielded once for each of its completions."""
        copies = trainer.num_generations_eval
        return Drawing(max(1, int(trainer.args.eval_batch_size) // copies), copies)

    def leave_out(self, trainer: Any, micro_batches: int) -> None:
        """Make the trainer count micro-batches that are left out of each step."""
        trainer.left_out = micro_batches
        trainer.run_chunks = _RUN_CHUNKS if micro_batches else None

    def run_share(self, trainer: Any) -> Mapping[str, float]:
        """Return the share of chunks that the passes over a generation batch run."""
        chunks = trainer.args.steps_per_generation
        share = 1.0 if trainer.run_chunks is None else min(1.0, trainer.run_chunks / chunks)
        return dict.fromkeys(trainer.passes, share)

    def loaded(self, trainer: Any, batch: Any) -> tuple[int, int]:
        """Return rows and tokens of a micro-batch that is trained on the completions of a generation batch."""
        rows, collation = trainer.args.per_device_train_batch_size, self.collation(trainer)
        assumed = [min(assumed_tokens(trainer.plan), trainer.max_completion_length)]
        widths = max(len(row[PROMPT]) for row in batch), max(max(row.get(WANTED, assumed)) for row in batch)
        return rows, rows * sum(-(-tokens // collation.multiple) * collation.multiple for tokens in widths)


def compares_with_old(plan: TrainingPlan) -> bool:
    """Return whether a plan's specification has the pass for old log-probabilities."""
    from autotune.trainers import find_trainer

    return OLD_PASS in find_trainer(plan.trainer).program(plan).names
