"""TRL's connection to vLLM: generates a given number of tokens in a probe, and is replaced in a trace."""

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
    """Replaces TRL's connection to vLLM in a trace: gathers and merges weights, and returns given completions.

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
        # Allocate and free a tensor, so that the trace records the bytes that the training holds meanwhile.
        torch.empty(1, device=self.accelerator.device)
        completions = [[TOKEN] * self.tokens for _ in prompts]
        return prompts, completions, [[[0.0]] * self.tokens for _ in prompts], None


def is_merged(model: Any) -> bool:
    """Whether a trace merges and gathers weights for vLLM: not 4-bit ones, which bitsandbytes cannot merge there."""
    return not getattr(model, "is_quantized", False)


def without_weights(module: ModuleType) -> AbstractContextManager[object]:
    """Patch a module of TRL to start vLLM with random weights: a probe's model may have no others.

    They take the same memory, and TRL replaces them by the trained model's before the first generation. On a virtual
    device, vLLM is not started, and no server is contacted; TRL's own checks of both still run.
    """
    if not hasattr(module, "LLM"):
        return nullcontext()
    if is_tracing():
        info = {"model_config": {"logprobs_mode": "processed_logprobs"}}
        client = mock.Mock(**{"return_value.get_server_info.return_value": info})
        return mock.patch.multiple(module, LLM=mock.Mock(), VLLMClient=client)
    return mock.patch.object(module, "LLM", partial(module.LLM, load_format="dummy"))


def make_long(generation: Any, tokens: int) -> None:
    """Make TRL's connection to vLLM generate exactly ``tokens`` tokens, regardless of the end token."""
    if isinstance(generation, GivenCompletions):
        generation.tokens = tokens
        return
    generation.max_completion_length = tokens
    generation.generation_kwargs = {**generation.generation_kwargs, "min_tokens": tokens, "ignore_eos": True}
