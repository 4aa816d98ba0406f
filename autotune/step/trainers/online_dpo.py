"""``OnlineDPOTrainer``: prompts of which each is completed twice in its micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import torch
from torch.nn.functional import pad
from trl.data_utils import maybe_apply_chat_template
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer, online_dpo_trainer
from trl.experimental.utils import truncate_right

from autotune.core.plan import TrainingPlan
from autotune.step.trainers.base import TOKEN, Collation
from autotune.step.trainers.prompts import WANTED, Prompted, assumed_tokens, require_generated
from autotune.step.trainers.vllm import is_merged, without_weights
from autotune.trainers.online_dpo import COMPLETIONS
from autotune.trainers.prompts import GENERATION, PROMPT, REFERENCE_PASS, SCORING, STAND_IN, SYNCHRONISATION
from autotune.virtual import adopt, phase


class _OnTokenizedPrompts(OnlineDPOTrainer):
    """TRL's trainer on tokenised prompts with the lengths of their completions.

    Attributes:
        plan: what is trained.
    """

    plan: TrainingPlan
    processing_class: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with without_weights(online_dpo_trainer):
            super().__init__(*args, **kwargs)

    def training_step(self, model: Any, inputs: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        rows = dict(inputs)
        self._prompt_ids: Sequence[Sequence[int]] = rows.pop(PROMPT)
        # TRL puts the first completions of all prompts before the second ones.
        self._wanted = np.array(rows.pop(WANTED)).T.ravel()
        return super().training_step(model, rows, *args, **kwargs)

    def _generate(self, model: Any, prompts: Sequence[Any], images: Any = None) -> Any:
        longest = int(self._wanted.max())
        if self.plan.args.get("vllm_mode") == STAND_IN:
            return *self._as_vllm_returns(longest), None
        if self.use_vllm:
            return *self._from_vllm(prompts, images, longest), None
        self.generation_config.max_new_tokens = self.generation_config.min_new_tokens = longest
        with (
            mock.patch.object(self, "processing_class", self._padded_prompts),
            mock.patch.object(online_dpo_trainer, "truncate_right", self._ended),
        ):
            return super()._generate(model, [""] * len(prompts), images)

    def _generate_vllm(self, prompts: Sequence[Any], images: Any = None) -> Any:
        *made, _ = self._generate(self.model, prompts, images)
        return tuple(made)

    def _from_vllm(self, prompts: Sequence[Any], images: Any, longest: int) -> tuple[Any, ...]:
        """Return what TRL makes of completions of vLLM, each ended at its length."""
        self.generation_config.max_tokens = self.generation_config.min_tokens = longest
        self.generation_config.ignore_eos = True
        *prompt, ids, mask = super()._generate_vllm(prompts, images)
        ended = np.arange(ids.shape[1]) < self._wanted[:, None]
        mask = mask * torch.as_tensor(ended, device=ids.device)
        # TRL pads to the most tokens that a completion may have.
        missing = (0, self.args.max_new_tokens - ids.shape[1])
        return *prompt, pad(ids, missing, value=self._tokenizer.pad_token_id), pad(mask, missing)

    def _as_vllm_returns(self, longest: int) -> tuple[Any, ...]:
        """Return prompts and completions with their masks, as TRL makes tensors of what vLLM returns.

        Before, adapters are merged and weights gathered as for vLLM; without ``use_vllm``, TRL sends none.
        """
        with phase(SYNCHRONISATION):
            if is_merged(self.model):
                self._move_model_to_vllm_inner()
        prompts = self._padded_prompts()
        twice = {name: ids.repeat(COMPLETIONS, 1) for name, ids in prompts.items()}
        mask = (np.arange(longest) < self._wanted[:, None]).astype(np.int64)
        made = adopt({"ids": np.full(mask.shape, TOKEN, dtype=np.int64), "mask": mask})
        every = (twice["input_ids"], twice["attention_mask"], made["ids"], made["mask"])
        return tuple(tensor.to(self.accelerator.device) for tensor in every)

    def _padded_prompts(self, **_: Any) -> dict[str, Any]:
        """Return what the tokenizer makes of the micro-batch's prompts."""
        ids = {"input_ids": [list(ids) for ids in self._prompt_ids]}
        tensors: dict[str, Any] = adopt(self._tokenizer.pad(ids, padding_side="left", return_tensors="np"))
        return tensors

    def _ended(self, ids: Any, ends: Sequence[int], padding: int) -> Any:
        """End each completion at its length, and return what TRL makes of it."""
        require_generated(ids.shape[1], int(self._wanted.max()))
        last = np.arange(ids.shape[1]) == self._wanted[:, None] - 1
        last[self._wanted == ids.shape[1]] = False
        return truncate_right(torch.where(adopt({"last": last})["last"].to(ids.device), ends[0], ids), ends, padding)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        return super()._forward(*args, **kwargs) if torch.is_grad_enabled() else self.reference_pass(*args, **kwargs)

    def reference_pass(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the log-probabilities of the reference."""
        return super()._forward(*args, **kwargs)


class OnlineDirectPreferenceOptimization(Prompted):
    """The child's side of ``autotune.trainers.online_dpo``."""

    name = "online_dpo"
    config = OnlineDPOConfig
    trainer = OnlineDPOTrainer
    on_rows = _OnTokenizedPrompts
    completions_per_row = COMPLETIONS
    methods: ClassVar[Mapping[str, str]] = {
        GENERATION: "_generate",
        REFERENCE_PASS: "reference_pass",
        SCORING: "_calculate_rewards_from_functions",
    }

    def prompt_ids(self, trainer: Any, prompts: Sequence[Any]) -> Sequence[Sequence[int]]:
        """Return the tokens of prompts, as ``OnlineDPOTrainer._generate`` makes them in every micro-batch."""
        tokenizer = trainer.processing_class
        texts = [maybe_apply_chat_template({"prompt": prompt}, tokenizer)["prompt"] for prompt in prompts]
        ids: Sequence[Sequence[int]] = tokenizer(text=texts, add_special_tokens=False)["input_ids"]
        return ids

    def most_tokens(self, trainer: Any) -> int:
        """Return the most tokens of a completion."""
        return int(trainer.args.max_new_tokens)

    def building(self, make_model: Callable[[], Any]) -> AbstractContextManager[object]:
        """Make the trainer get its reference from ``make_model``, where TRL would copy the trained model.

        It needs as much; a trace cannot copy every architecture (Gemma 3).
        """
        return mock.patch.object(self.module, "create_reference_model", side_effect=lambda _: make_model().eval())

    def collation(self, trainer: Any) -> Collation:
        """Return that prompts are cut from the left, to what completions leave of the maximum length."""
        return Collation(cut=trainer.max_length)

    def loaded(self, trainer: Any, batch: Any) -> tuple[int, int]:
        """Return rows and tokens of the prompts and completions that the loss is computed of."""
        assumed = [min(assumed_tokens(trainer.plan), self.most_tokens(trainer))]
        prompt = max(map(len, batch[PROMPT]))
        drawn = max(map(max, batch.get(WANTED, [assumed])))
        completion = self.most_tokens(trainer) if trainer.use_vllm else drawn
        rows = COMPLETIONS * len(batch[PROMPT])
        return rows, rows * int(self.collation(trainer).joined(np.array(prompt), np.array(completion)))


ADAPTER = OnlineDirectPreferenceOptimization()
