"""Ends the completions of a batch at different tokens, so that padding brings the mask that it brings in a training.

A null GPU draws the last token of the vocabulary every time: all completions would have full length, or one token where
that token ends them. Instead the first row has full length and the others are a token shorter, as in the batch that a
trace or a probe takes for the worst (``arranged`` of ``autotune/step/trainers/prompts.py``).
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any


def end_apart() -> None:
    """Make transformers' ``generate``, if loaded, end rows at different tokens.

    Its stopping criteria are made at each call, so that a reference to ``generate`` itself, which FSDP2's wrapper takes
    before the first batch, leads here too.
    """
    utils = sys.modules.get("transformers.generation.utils")
    if utils is None:
        return
    make = utils.GenerationMixin._get_stopping_criteria

    class EndingApart(utils.StoppingCriteriaList):  # type: ignore[misc, name-defined]
        """The criteria of a call, which see tokens that :func:`_redraw` has replaced."""

        def __init__(self, criteria: Any, ends: Collection[int], least: int) -> None:
            super().__init__(criteria)
            self._ends, self._least = ends, least

        def __call__(self, ids: Any, scores: Any, **kwargs: Any) -> Any:
            _redraw(ids, self._ends, self._least, self.max_length)
            return super().__call__(ids, scores, **kwargs)

    def made(model: Any, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        criteria, ends = make(model, generation_config, *args, **kwargs), generation_config._eos_token_tensor
        # The rows of a beam search are not completions, and an assistant's tokens are proposals.
        other = (generation_config.num_beams or 1) > 1 or generation_config.is_assistant
        if other or ends is None or criteria.max_length is None:
            return criteria
        return EndingApart(criteria, ends.flatten().tolist(), generation_config.min_length or 0)

    utils.GenerationMixin._get_stopping_criteria = made


def _redraw(ids: Any, ends: Collection[int], least: int, most: int) -> None:
    """Replace the tokens that were drawn last.

    Nothing is allocated on the device: tokens are read by the host and written one by one.

    Args:
        ids: prompts and completions; shape (rows, length).
        ends: the tokens that end a completion.
        least, most: length of a row before which it may not end, and after which none is longer.
    """
    length = ids.shape[1]
    if length >= most:
        return
    for row, drawn in enumerate(ids[:, -1].tolist()):
        token = drawn
        while token in ends and token > 0:
            token -= 1
        if row > 0 and length == most - 1 > least:
            token = next(iter(ends))
        if token != drawn:
            ids[row, -1] = token
