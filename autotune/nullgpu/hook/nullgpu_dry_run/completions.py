"""Gives the completions of a batch different lengths, so that the batch is padded and has an attention mask.

A null GPU samples the last token of the vocabulary every time: all completions would have full length, or one token if
that token is EOS. Instead the first row gets full length and the others are one token shorter, as in the worst batch of
a trace or a probe (``arranged`` of ``autotune/step/trainers/prompts.py``).
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any


def stagger_completions() -> None:
    """Make transformers' ``generate``, if loaded, end rows at different lengths.

    Patches the stopping criteria, which each call builds anew, instead of ``generate``: FSDP2's wrapper takes a
    reference to that before the first batch.
    """
    utils = sys.modules.get("transformers.generation.utils")
    if utils is None:
        return
    original = utils.GenerationMixin._get_stopping_criteria

    class StaggeredCompletions(utils.StoppingCriteriaList):  # type: ignore[misc, name-defined]
        """Stopping criteria that replace the sampled tokens before they test them."""

        def __init__(self, criteria: Any, end_tokens: Collection[int], min_length: int) -> None:
            super().__init__(criteria)
            self._end_tokens, self._min_length = end_tokens, min_length

        def __call__(self, ids: Any, scores: Any, **kwargs: Any) -> Any:
            _stagger(ids, self._end_tokens, self._min_length, self.max_length)
            return super().__call__(ids, scores, **kwargs)

    def staggered(model: Any, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        criteria, end_tokens = original(model, generation_config, *args, **kwargs), generation_config._eos_token_tensor
        # The rows of a beam search are hypotheses, and the tokens of an assistant model are proposals.
        other = (generation_config.num_beams or 1) > 1 or generation_config.is_assistant
        if other or end_tokens is None or criteria.max_length is None:
            return criteria
        return StaggeredCompletions(criteria, end_tokens.flatten().tolist(), generation_config.min_length or 0)

    utils.GenerationMixin._get_stopping_criteria = staggered


def _stagger(ids: Any, end_tokens: Collection[int], min_length: int, max_length: int) -> None:
    """Replace the tokens sampled last, so that only EOS one token before ``max_length`` ends a row, except the first.

    Reads and writes tokens on the host: nothing may be allocated on the device.

    Args:
        ids: prompts and completions; shape (rows, length).
        end_tokens: the EOS tokens.
        min_length, max_length: bounds of a row's length, prompt included.
    """
    length = ids.shape[1]
    if length >= max_length:
        return
    for row, sampled in enumerate(ids[:, -1].tolist()):
        token = sampled
        while token in end_tokens and token > 0:
            token -= 1
        if row > 0 and length == max_length - 1 > min_length:
            token = next(iter(end_tokens))
        if token != sampled:
            ids[row, -1] = token
