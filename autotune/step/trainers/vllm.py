"""Makes TRL's connection to vLLM generate a given number of tokens in a probe, and replaces it in a trace."""

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


class FixedCompletions(VLLMGeneration):
    """Replaces TRL's connection to vLLM in a trace: gathers and merges weights, and generates one token id.

    Allocates no memory for vLLM, which follows from vLLM's own rule (``autotune/planning/vllm.py``).

    Attributes:
        tokens: number of tokens of each completion.
    """

    def __init__(self, *, model: Any, accelerator: Any, **_: Any) -> None:
        self.tokens = 1
        self.model, self.accelerator, self._dist = model, accelerator, DistributedBackend(accelerator)

    def sync_weights(self) -> None:
        """Merge adapters and gather each weight as for vLLM, without sending any."""
        with phase(SYNCHRONISATION):
            if merges_weights(self.model):
                deque(self._iter_named_params(), maxlen=0)

    def generate(self, prompts: list[list[int]], **_: Any) -> tuple[Any, ...]:
        """Return prompts, completions, the log-probability of each token, and None for other candidates."""
        # Allocate and free a tensor: the trace records the training's memory during generation.
        torch.empty(1, device=self.accelerator.device)
        completions = [[TOKEN] * self.tokens for _ in prompts]
        return prompts, completions, [[[0.0]] * self.tokens for _ in prompts], None


def merges_weights(model: Any) -> bool:
    """Whether a trace merges and gathers weights for vLLM; bitsandbytes cannot merge 4-bit ones in a trace."""
    return not getattr(model, "is_quantized", False)


def with_random_weights(module: ModuleType) -> AbstractContextManager[object]:
    """Patch a module of TRL to start vLLM with random weights, since a probe's model may have no checkpoint.

    They need the same memory, and TRL replaces them by the trained model's before the first generation. On a virtual
    device, vLLM is not started, and no server is contacted; TRL's own checks of both still run.
    """
    if not hasattr(module, "LLM"):
        return nullcontext()
    if is_tracing():
        info = {"model_config": {"logprobs_mode": "processed_logprobs"}}
        client = mock.Mock(**{"return_value.get_server_info.return_value": info})
        return mock.patch.multiple(module, LLM=mock.Mock(), VLLMClient=client)
    return mock.patch.object(module, "LLM", partial(module.LLM, load_format="dummy"))


def set_completion_tokens(generation: Any, tokens: int) -> None:
    """Make TRL's connection to vLLM generate exactly ``tokens`` tokens, regardless of the end token."""
    if isinstance(generation, FixedCompletions):
        generation.tokens = tokens
        return
    generation.max_completion_length = tokens
    generation.generation_kwargs = {**generation.generation_kwargs, "min_tokens": tokens, "ignore_eos": True}
