"""TRL's connection to vLLM: made to generate as many tokens as a probe wants, and replaced in a trace."""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from trl.distributed import DistributedBackend
from trl.generation.vllm_generation import VLLMGeneration

from autotune.step.trainers.base import TOKEN
from autotune.trainers.prompts import SYNCHRONISATION
from autotune.virtual import is_tracing, phase


class GivenCompletions(VLLMGeneration):
    """Stands for TRL's connection to vLLM in a trace: weights are gathered and merged, and completions are given.

    It holds nothing: what vLLM itself holds follows from vLLM's own rule (``autotune/planning/vllm.py``).

    Attributes:
        tokens: of each completion.
    """

    def __init__(self, *, model: Any, accelerator: Any, **_: Any) -> None:
        self.tokens = 1
        self.model, self.accelerator, self._dist = model, accelerator, DistributedBackend(accelerator)

    def sync_weights(self) -> None:
        """Merge adapters and gather each weight, as for vLLM, and send none."""
        with phase(SYNCHRONISATION):
            if is_merged(self.model):
                deque(self._iter_named_params(), maxlen=0)

    def generate(self, prompts: list[list[int]], **_: Any) -> tuple[Any, ...]:
        """Return prompts, completions, the log-probability of each token, and nothing in place of other candidates."""
        # An allocation and its end are a moment, at which the trace records what the training holds meanwhile.
        torch.empty(1, device=self.accelerator.device)
        completions = [[TOKEN] * self.tokens for _ in prompts]
        return prompts, completions, [[[0.0]] * self.tokens for _ in prompts], None


def is_merged(model: Any) -> bool:
    """Whether a trace makes weights whole for vLLM: not those in 4 bits, which bitsandbytes cannot merge in a trace."""
    return not getattr(model, "is_quantized", False)


def without_weights(module: ModuleType) -> AbstractContextManager[object]:
    """Let a module of TRL start vLLM with random weights: a probe's model may have no others.

    They take the same memory, and TRL replaces them by the trained model's before it generates for the first time.
    On a virtual device, neither vLLM is started nor a server asked; what TRL itself demands of both is still checked.
    """
    if not hasattr(module, "LLM"):
        return nullcontext()
    if is_tracing():
        info = {"model_config": {"logprobs_mode": "processed_logprobs"}}
        client = mock.Mock(**{"return_value.get_server_info.return_value": info})
        return mock.patch.multiple(module, LLM=mock.Mock(), VLLMClient=client)
    return mock.patch.object(module, "LLM", partial(module.LLM, load_format="dummy"))


def make_long(generation: Any, tokens: int) -> None:
    """Make TRL's connection to vLLM generate completions of so many tokens, whatever the model would end them with."""
    if isinstance(generation, GivenCompletions):
        generation.tokens = tokens
        return
    generation.max_completion_length = tokens
    generation.generation_kwargs = {**generation.generation_kwargs, "min_tokens": tokens, "ignore_eos": True}
