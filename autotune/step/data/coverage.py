"""Drops the rows with the longest prompts, for trainers that cut none."""

from __future__ import annotations

import numpy as np
from datasets import Dataset

from autotune.core.lengths import LengthDistribution
from autotune.core.protocol import PrepareRequest
from autotune.core.workload import DroppedRows
from autotune.errors import InputError
from autotune.step.trainers import adapter
from autotune.trainers import find_trainer

_FEWEST = 2
"""Fewest rows of a dataset (:func:`autotune.inspection.rows.check_row_count`)."""
_NAMED = 10
"""Most rows that are named; the others are counted."""


def covered(rows: Dataset, request: PrepareRequest) -> tuple[Dataset, DroppedRows | None]:
    """Return tokenised rows without those whose prompts are longer than the request's coverage needs, and which.

    The longest prompt that is kept is the shortest of which it is true that at least the share ``prompt_coverage`` of
    all prompts is no longer. Prompts of equal length are kept or dropped together.

    Raises:
        InputError: too few are left.
    """
    share = request.rollouts.prompt_coverage
    if share >= 1:
        return rows, None
    prompts = adapter(request.trainer).lengths(rows)[:, find_trainer(request.trainer).parts.index("prompt")]
    lengths, counts = np.unique(prompts, return_counts=True)
    distribution = LengthDistribution(dict(zip(lengths.tolist(), counts.tolist(), strict=True)))
    cut = distribution.quantile(share)
    kept, longer = np.flatnonzero(prompts <= cut), np.flatnonzero(prompts > cut)
    if not len(longer):
        return rows, None
    if len(kept) < _FEWEST:
        raise InputError(
            f"--prompt-coverage {share:g} keeps {len(kept)} of the {len(rows)} prompts of {request.dataset.name}.",
            hint="Give a larger share.",
        )
    longest = longer[np.argsort(-prompts[longer], kind="stable")][:_NAMED]
    named = zip((longest + 1).tolist(), prompts[longest].tolist(), strict=True)
    return rows.select(kept), DroppedRows(len(longer), cut, tuple(named))
