"""Shortens the generation of tokens in a trace: traces the prefill, a decoding step half-way, and the last step.

The key-value cache is largest in the last step, and a step half-way takes the mean time. Tracing every step takes a
hundred times as long; peak memory agrees within 0.1 %, time within 3 % (tests/step/test_decode_steps.py).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
from transformers import GenerationMixin

from autotune.virtual.engine.tracing import generating, is_tracing, repeated, trace_inputs
from autotune.virtual.operators.known import SAMPLED_TOKEN


@contextmanager
def short_generation() -> Iterator[None]:
    """Within a trace, patch ``generate`` to run only a few of its steps; otherwise do nothing."""
    if not is_tracing():
        yield
        return
    whole = GenerationMixin.generate

    def generate(model: Any, *positional: Any, generation_config: Any, **inputs: Any) -> Any:
        with generating():
            return _Generation(whole, model, generation_config, inputs).run()

    with mock.patch.object(GenerationMixin, "generate", generate):
        yield


class _Generation:
    """One call of ``generate``.

    Args:
        whole: transformers' function.
        inputs: its named arguments: left-padded prompt ids and their mask.
    """

    def __init__(self, whole: Any, model: Any, config: Any, inputs: dict[str, Any]) -> None:
        self._whole, self._model, self._config, self._inputs = whole, model, config, inputs
        self._ids = str(model.main_input_name)
        self._rows, self._prompt = inputs[self._ids].shape

    def run(self) -> Any:
        """Return ids of prompts and completions, shape (rows, prompt + max_new_tokens); all are the same token."""
        new = self._config.max_new_tokens
        first = self._step(**self._inputs)
        cache = getattr(first, "past_key_values", None)
        del first
        if new > 1:
            # The code of `generate` before its loop runs once in reality, so its time is not counted again here.
            with repeated(0):
                self._continued(cache, self._prompt + new // 2, times=new - 1)
                # The loop keeps the scores of the token before the last, so both are generated.
                last = min(2, new - 1)
                self._continued(cache, self._prompt + new - last, last)
        ids = trace_inputs(np.full((self._rows, self._prompt + new), SAMPLED_TOKEN, dtype=np.int64))
        return ids.to(self._inputs[self._ids].device)

    def _step(self, new: int = 1, times: int = 1, **inputs: Any) -> Any:
        """Generate ``new`` tokens, and count the time of the decoding loop ``times`` times."""
        config = copy.deepcopy(self._config)
        config.max_new_tokens = new
        config.return_dict_in_generate = True
        kind: Any = type(self._model)
        loop = kind._sample

        @functools.wraps(loop)
        def counted(*args: Any, **kwargs: Any) -> Any:
            with repeated(times):
                return loop(*args, **kwargs)

        with mock.patch.object(kind, "_sample", counted):
            return self._whole(self._model, generation_config=config, **inputs)

    def _continued(self, cache: Any, tokens: int, new: int = 1, times: int = 0) -> None:
        """Generate ``new`` tokens after ``tokens`` ones, of which all but the last are in the cache."""
        shape = (self._rows, tokens)
        known = trace_inputs({"ids": np.full(shape, SAMPLED_TOKEN, np.int64), "mask": np.ones(shape, np.int64)})
        device = self._inputs[self._ids].device
        inputs = {self._ids: known["ids"].to(device), "attention_mask": known["mask"].to(device)}
        # With padded prompts, attention gets a mask in every step, and may copy keys and values for it.
        inputs["attention_mask"][:, : self._prompt] = self._inputs.get("attention_mask", 1)
        if cache is not None:
            _fill(cache, tokens - 1)
            inputs["past_key_values"] = cache
        self._step(new, times, **inputs)


def _fill(cache: Any, tokens: int) -> None:
    """Resize a key-value cache to its size after ``tokens`` tokens."""
    for layer in cache.layers:
        # Linear attention layers have a state of fixed size instead.
        if getattr(layer, "keys", None) is None:
            continue
        held = tokens
        if getattr(layer, "is_sliding", False):
            held, layer.cumulative_length = min(tokens, layer.sliding_window - 1), tokens
        for name in ("keys", "values"):
            before = getattr(layer, name)
            rows, heads, _, width = before.shape
            setattr(layer, name, None)
            new = before.new_empty
            del before
            setattr(layer, name, new(rows, heads, held, width))
