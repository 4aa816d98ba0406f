"""Adapter base of TRL's trainers that compare the completions of a prompt: GRPO and RLOO."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import gcd
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import torch

from autotune.core.plan import TrainingPlan
from autotune.step.trainers.base import Drawing
from autotune.step.trainers.generating import Generating, OnTokenizedPrompts
from autotune.trainers.groups import OLD_PASS
from autotune.trainers.prompts import GENERATION, REFERENCE_PASS, SCORING
from autotune.virtual import assume, is_tracing, on_real_tensors, phase
from autotune.virtual.engine.dispatch import UnknownShapeError


class _GroupTrainer(OnTokenizedPrompts):
    """TRL's trainer with the passes over a generation batch as phases, of which a trace runs one chunk."""

    beta: float
    _passes: Iterator[str]

    def _prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        previous = self._buffered_inputs
        inputs = super()._prepare_inputs(*args, **kwargs)
        if self._has_images and is_tracing() and self._buffered_inputs is not previous:
            # Meanwhile TRL also holds the unshuffled tensors, and those of the previous generation.
            with phase(SCORING):
                count = 2 if previous is None else 1
                values = [value for batch in self._buffered_inputs * count for value in batch.values()]
                copies = [torch.empty_like(value) for value in values if isinstance(value, torch.Tensor)]
                del copies
        return inputs

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Any:
        self._passes = iter(self.passes)
        return super()._generate_and_score_completions(inputs)

    @property
    def passes(self) -> tuple[str, ...]:
        """The passes over a generation batch, in TRL's order."""
        old = OLD_PASS in self.adapter.specification.program(self.plan).names
        return (*((OLD_PASS,) if old else ()), *((REFERENCE_PASS,) if self.beta else ()))

    def _get_per_token_logps_and_entropies(
        self, model: Any, ids: Any, mask: Any, logits_to_keep: int, batch_size: int | None = None, **kwargs: Any
    ) -> Any:
        # Only passes over a generation batch have a chunk size.
        if batch_size is None or torch.is_grad_enabled():
            return super()._get_per_token_logps_and_entropies(model, ids, mask, logits_to_keep, batch_size, **kwargs)
        compute = self.old_pass if next(self._passes) == OLD_PASS else self.reference_pass
        return compute(model, ids, mask, logits_to_keep, batch_size, **kwargs)

    def get_high_entropy_mask(self, entropies: Any, mask: Any, threshold: float) -> Any:
        """Return a mask of the tokens with the highest entropy (``top_entropy_quantile``); of all tokens in a trace."""
        try:
            return super().get_high_entropy_mask(entropies, mask, threshold)
        except UnknownShapeError:
            assume("every token is trained on, whichever top_entropy_quantile chooses")
            alone = SimpleNamespace(pad_across_processes=lambda found, **_: found, gather=lambda found: found)
            with on_real_tensors(), mock.patch.object(self, "accelerator", alone):
                # PyTorch refuses a threshold that is no share.
                super().get_high_entropy_mask(torch.ones(1, 1), torch.ones(1, 1), threshold)
            return mask.bool()

    def old_pass(self, model: Any, ids: Any, mask: Any, logits_to_keep: int, batch_size: int, **kwargs: Any) -> Any:
        """Compute the log-probabilities of the old policy or the reference; in a trace, zeros after the first chunk."""
        # The plan's batch geometry has the number of chunks.
        executed = min(len(ids), batch_size) if is_tracing() else len(ids)
        logps, *others = super()._get_per_token_logps_and_entropies(
            model, ids[:executed], mask[:executed], logits_to_keep, batch_size, **kwargs
        )
        missing = logps.new_zeros(len(ids) - executed, *logps.shape[1:])
        return (torch.cat([logps, missing]) if executed < len(ids) else logps, *others)

    # Each phase needs a method of its own (`methods`).
    reference_pass = old_pass


class Groups(Generating):
    """Adapter base for ``autotune.trainers.groups``."""

    on_rows = _GroupTrainer
    methods: ClassVar[Mapping[str, str]] = {
        GENERATION: "_generate_single_turn",
        OLD_PASS: "old_pass",
        REFERENCE_PASS: "reference_pass",
        SCORING: "_calculate_rewards",
    }

    @property
    def tokenizing(self) -> Mapping[str, object]:
        """Return arguments of a trainer that only tokenises, without a reference."""
        return {**super().tokenizing, "beta": 0.0}

    def derived(self, plan: TrainingPlan) -> Mapping[str, object]:
        """Return the micro-batches of a generation batch."""
        return {"steps_per_generation": plan.steps_per_generation}

    def drawing(self, trainer: Any) -> Drawing:
        """Return the drawing of a generation batch's prompts at once, each yielded once per completion.

        A process may have only some of a prompt's completions; all processes together have whole groups.
        """
        drawn = trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation
        copies, uses = gcd(trainer.num_generations, drawn), trainer.args.steps_per_generation * trainer.num_iterations
        return Drawing(drawn // copies, copies, uses, shared=trainer.num_generations // copies)

    def evaluation_drawing(self, trainer: Any) -> Drawing:
        """Return a drawing that yields each prompt once per completion."""
        copies = trainer.num_generations_eval
        return Drawing(max(1, int(trainer.args.eval_batch_size) // copies), copies)
