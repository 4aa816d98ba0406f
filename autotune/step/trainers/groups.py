"""The child's side of TRL's trainers that compare the completions of a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import gcd
from typing import Any, ClassVar
from unittest import mock

import torch

from autotune.core.plan import TrainingPlan
from autotune.step.trainers.base import Drawing
from autotune.step.trainers.generating import Generating, OnTokenizedPrompts
from autotune.trainers import find_trainer
from autotune.trainers.groups import OLD_PASS
from autotune.trainers.prompts import GENERATION, REFERENCE_PASS, SCORING
from autotune.virtual import assume, is_tracing, phase
from autotune.virtual.dispatch import UnknownShapeError

# Chunks of a pass over a generation batch that are run, where steps are not run whole.
_RUN_CHUNKS = 2


class _InGroups(OnTokenizedPrompts):
    """TRL's trainer with the passes over a generation batch, of which a probe runs a few chunks."""

    beta: float
    _passes: Iterator[str]

    @property
    def run_chunks(self) -> int | None:
        """Most chunks of a pass over a generation batch that are run, or None for all."""
        return _RUN_CHUNKS if self.left_out else None

    def _prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        shuffle = self.module.shuffle_sequence_dict

        def copied_in_order(batch: Any) -> Any:
            with mock.patch.object(torch, "randperm", torch.arange):
                return shuffle(batch)

        before = self._buffered_inputs
        # TRL shuffles the completions of a generation batch; here, rows decide which of them share a micro-batch.
        with mock.patch.object(self.module, "shuffle_sequence_dict", copied_in_order):
            inputs = super()._prepare_inputs(*args, **kwargs)
        if self._pictured and is_tracing() and self._buffered_inputs is not before:
            # Meanwhile it has held them as they were generated, and those of the generation before.
            with phase(SCORING):
                copies = 2 if before is None else 1
                held = [value for batch in self._buffered_inputs * copies for value in batch.values()]
                held = [torch.empty_like(value) for value in held if isinstance(value, torch.Tensor)]
                del held
        return inputs

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Any:
        self._passes = iter(self.passes)
        return super()._generate_and_score_completions(inputs)

    @property
    def passes(self) -> tuple[str, ...]:
        """The passes over a generation batch, in TRL's order."""
        old = OLD_PASS in find_trainer(self.plan.trainer).program(self.plan).names
        return (*((OLD_PASS,) if old else ()), *((REFERENCE_PASS,) if self.beta else ()))

    def _get_per_token_logps_and_entropies(
        self, model: Any, ids: Any, mask: Any, kept: int, batch_size: int | None = None, **kwargs: Any
    ) -> Any:
        # Only the passes over a generation batch go through it in chunks.
        if batch_size is None or torch.is_grad_enabled():
            return super()._get_per_token_logps_and_entropies(model, ids, mask, kept, batch_size, **kwargs)
        run = self.old_pass if next(self._passes) == OLD_PASS else self.reference_pass
        return run(model, ids, mask, kept, batch_size, **kwargs)

    def get_high_entropy_mask(self, entropies: Any, mask: Any, threshold: float) -> Any:
        """Return which tokens have the highest entropy (``top_entropy_quantile``); in a trace, which has none, all."""
        try:
            return super().get_high_entropy_mask(entropies, mask, threshold)
        except UnknownShapeError:
            assume("every token is trained on, whichever top_entropy_quantile chooses")
            return mask.bool()

    def old_pass(self, model: Any, ids: Any, mask: Any, kept: int, batch_size: int, **kwargs: Any) -> Any:
        """Compute the log-probabilities of the model before the update, or of the reference."""
        run = len(ids) if self.run_chunks is None else min(len(ids), self.run_chunks * batch_size)
        found, *others = super()._get_per_token_logps_and_entropies(
            model, ids[:run], mask[:run], kept, batch_size, **kwargs
        )
        missing = found.new_zeros(len(ids) - run, *found.shape[1:])
        return (torch.cat([found, missing]) if run < len(ids) else found, *others)

    # Phases are named by the methods in which they run.
    reference_pass = old_pass


class Groups(Generating):
    """The child's side of ``autotune.trainers.groups``."""

    on_rows = _InGroups
    methods: ClassVar[Mapping[str, str]] = {
        GENERATION: "_generate_single_turn",
        OLD_PASS: "old_pass",
        REFERENCE_PASS: "reference_pass",
        SCORING: "_calculate_rewards",
    }

    @property
    def tokenizing(self) -> Mapping[str, object]:
        """Return arguments for a trainer that only tokenises, and so needs no reference."""
        return {**super().tokenizing, "beta": 0.0}

    def derived(self, plan: TrainingPlan) -> Mapping[str, object]:
        """Return the micro-batches of a generation batch."""
        return {"steps_per_generation": plan.steps_per_generation}

    def drawing(self, trainer: Any) -> Drawing:
        """Return that the prompts of a generation batch are drawn at once, and yielded once for each completion.

        The completions of a process need not be whole groups; those of all processes are.
        """
        drawn = trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation
        copies, uses = gcd(trainer.num_generations, drawn), trainer.args.steps_per_generation * trainer.num_iterations
        return Drawing(drawn // copies, copies, uses, shared=trainer.num_generations // copies)

    def evaluation_drawing(self, trainer: Any) -> Drawing:
        """Return that each prompt is yielded once for each of its completions."""
        copies = trainer.num_generations_eval
        return Drawing(max(1, int(trainer.args.eval_batch_size) // copies), copies)

    def run_share(self, trainer: Any) -> Mapping[str, float]:
        """Return the share of chunks that the passes over a generation batch run."""
        chunks = trainer.args.steps_per_generation
        share = 1.0 if trainer.run_chunks is None else min(1.0, trainer.run_chunks / chunks)
        return dict.fromkeys(trainer.passes, share)
