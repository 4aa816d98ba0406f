"""``OnlineDPOTrainer``: each micro-batch generates two completions per prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import torch
from torch.nn.functional import pad
from trl.data_utils import maybe_apply_chat_template
from trl.experimental.online_dpo import OnlineDPOTrainer, online_dpo_trainer
from trl.experimental.utils import truncate_right

from autotune.core.plan import TrainingPlan
from autotune.step.trainers.base import TOKEN, Collation
from autotune.step.trainers.prompts import (
    COMPLETED,
    COMPLETION_TOKENS,
    NO_TOKEN,
    Prompted,
    RewardArguments,
    default_completion_tokens,
    require_generated,
)
from autotune.step.trainers.vllm import merges_weights, with_random_weights
from autotune.trainers.online_dpo import COMPLETIONS
from autotune.trainers.prompts import GENERATION, PROMPT, REFERENCE_PASS, SCORING, STAND_IN_SERVER, SYNCHRONISATION
from autotune.virtual import phase, trace_inputs


class _OnTokenizedPrompts(OnlineDPOTrainer):
    """TRL's trainer on tokenised prompts with given lengths of their completions.

    Attributes:
        plan: the training plan.
    """

    plan: TrainingPlan
    processing_class: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with with_random_weights(online_dpo_trainer):
            super().__init__(*args, **kwargs)

    def training_step(self, model: Any, inputs: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        rows = dict(inputs)
        self._prompt_ids: Sequence[Sequence[int]] = rows.pop(PROMPT)
        # TRL puts the first completions of all prompts before the second ones.
        self._completion_tokens = np.array(rows.pop(COMPLETION_TOKENS)).T.ravel()
        return super().training_step(model, rows, *args, **kwargs)

    def _generate(self, model: Any, prompts: Sequence[Any], images: Any = None) -> Any:
        longest = int(self._completion_tokens.max())
        if self.plan.args.get("vllm_mode") == STAND_IN_SERVER:
            return *self._vllm_stand_in(longest), None
        if self.use_vllm:
            return *self._generate_with_vllm(prompts, images, longest), None
        self.generation_config.max_new_tokens, self.generation_config.eos_token_id = longest, NO_TOKEN
        with (
            mock.patch.object(self, "processing_class", self._padded_prompts),
            mock.patch.object(online_dpo_trainer, "truncate_right", self._end_completions),
        ):
            return super()._generate(model, [""] * len(prompts), images)

    def _generate_vllm(self, prompts: Sequence[Any], images: Any = None) -> Any:
        *outputs, _ = self._generate(self.model, prompts, images)
        return tuple(outputs)

    def _generate_with_vllm(self, prompts: Sequence[Any], images: Any, longest: int) -> tuple[Any, ...]:
        """Return TRL's tensors of vLLM's completions, each masked after its length."""
        self.generation_config.max_tokens = self.generation_config.min_tokens = longest
        self.generation_config.ignore_eos = True
        *prompt, ids, mask = super()._generate_vllm(prompts, images)
        is_completion = np.arange(ids.shape[1]) < self._completion_tokens[:, None]
        mask = mask * torch.as_tensor(is_completion, device=ids.device)
        # TRL pads to the maximum length of a completion.
        missing = (0, self.args.max_new_tokens - ids.shape[1])
        return *prompt, pad(ids, missing, value=self._tokenizer.pad_token_id), pad(mask, missing)

    def _vllm_stand_in(self, longest: int) -> tuple[Any, ...]:
        """Return prompts and completions with their masks, in place of vLLM's.

        Before, merges adapters and gathers weights as for vLLM; without ``use_vllm``, TRL sends none.
        """
        with phase(SYNCHRONISATION):
            if merges_weights(self.model):
                self._move_model_to_vllm_inner()
        prompts = self._padded_prompts()
        twice = {name: ids.repeat(COMPLETIONS, 1) for name, ids in prompts.items()}
        mask = (np.arange(longest) < self._completion_tokens[:, None]).astype(np.int64)
        outputs = trace_inputs({"ids": np.full(mask.shape, TOKEN, dtype=np.int64), "mask": mask})
        tensors = (twice["input_ids"], twice["attention_mask"], outputs["ids"], outputs["mask"])
        return tuple(tensor.to(self.accelerator.device) for tensor in tensors)

    def _padded_prompts(self, **_: Any) -> dict[str, Any]:
        """Return the padded token ids and the mask of the micro-batch's prompts."""
        ids = {"input_ids": [list(ids) for ids in self._prompt_ids]}
        tensors: dict[str, Any] = trace_inputs(self._tokenizer.pad(ids, padding_side="left", return_tensors="np"))
        return tensors

    def _end_completions(self, ids: Any, ends: Sequence[int], padding: int) -> Any:
        """Put an EOS token at each completion's length, and truncate there as TRL does."""
        require_generated(ids.shape[1], int(self._completion_tokens.max()))
        last = np.arange(ids.shape[1]) == self._completion_tokens[:, None] - 1
        last[self._completion_tokens == ids.shape[1]] = False
        ended = torch.where(trace_inputs({"last": last})["last"].to(ids.device), NO_TOKEN, ids)
        truncated, mask = truncate_right(ended, [NO_TOKEN], padding)
        return torch.where(truncated == NO_TOKEN, ends[0], truncated), mask

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        return super()._forward(*args, **kwargs) if torch.is_grad_enabled() else self.reference_pass(*args, **kwargs)

    def reference_pass(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the log-probabilities of the reference."""
        return super()._forward(*args, **kwargs)


class OnlineDirectPreferenceOptimization(Prompted):
    """Adapter for ``autotune.trainers.online_dpo``."""

    on_rows = _OnTokenizedPrompts
    completions_per_row = COMPLETIONS
    # As in ``OnlineDPOTrainer.training_step`` and ``_calculate_rewards_from_functions``.
    reward_arguments = RewardArguments(own=(*COMPLETED, "trainer_state"), unpassed=("prompt",))
    methods: ClassVar[Mapping[str, str]] = {
        GENERATION: "_generate",
        REFERENCE_PASS: "reference_pass",
        SCORING: "_calculate_rewards_from_functions",
    }

    def prompt_ids(self, trainer: Any, prompts: Sequence[Any]) -> Sequence[Sequence[int]]:
        """Return the tokens of prompts, tokenised as in ``OnlineDPOTrainer._generate``."""
        tokenizer = trainer.processing_class
        texts = [maybe_apply_chat_template({"prompt": prompt}, tokenizer)["prompt"] for prompt in prompts]
        ids: Sequence[Sequence[int]] = tokenizer(text=texts, add_special_tokens=False)["input_ids"]
        return ids

    def max_completion_tokens(self, trainer: Any) -> int:
        """Return the maximum tokens of a completion."""
        return int(trainer.args.max_new_tokens)

    def loading_models_from(self, make_model: Callable[[], Any]) -> AbstractContextManager[object]:
        """Replace TRL's copy of the trained model as the reference by ``make_model``.

        It needs the same memory, and a trace cannot copy every architecture (Gemma 3).
        """
        return mock.patch.object(self.module, "create_reference_model", side_effect=lambda _: make_model().eval())

    def collation(self, trainer: Any) -> Collation:
        """Return a collation that cuts prompts from the left to fit the maximum length with the completions."""
        return Collation(cut=trainer.max_length)

    def rows_and_tokens(self, trainer: Any, batch: Any) -> tuple[int, int]:
        """Return the rows and the padded tokens of prompts and completions of a micro-batch."""
        assumed = [min(default_completion_tokens(trainer.plan), self.max_completion_tokens(trainer))]
        prompt = max(map(len, batch[PROMPT]))
        drawn = max(map(max, batch.get(COMPLETION_TOKENS, [assumed])))
        completion = self.max_completion_tokens(trainer) if trainer.use_vllm else drawn
        rows = COMPLETIONS * len(batch[PROMPT])
        return rows, rows * int(self.collation(trainer).joined(np.array(prompt), np.array(completion)))
