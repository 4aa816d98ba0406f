"""A reward function for the examples of trainers that generate: ``--reward-funcs examples.rewards.brevity``."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST = 200
"""Characters from which a completion gets nothing."""


def brevity(completions: Sequence[str], **_: object) -> list[float]:
    """Return a reward for each completion, from 1 for an empty one to 0 for a long one."""
    return [max(0.0, 1 - len(completion) / LONGEST) for completion in completions]
