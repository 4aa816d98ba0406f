"""``num_iterations``: the number of updates on the same completions."""

from __future__ import annotations

from autotune.techniques.base import POSITIVE, Effect, NumberTechnique, Option
from autotune.techniques.trace_impact import TraceImpact


class NumIterations(NumberTechnique):
    """Fewer generations for the same number of updates; all but the first update are off-policy."""

    summary = "Number of updates on the same completions."
    options = (
        Option(1, "TRL's default: each completion is trained on once"),
        Option(2, "any number", Effect.CHANGES_TRAINING, family=POSITIVE),
    )
    changes = "later updates are off-policy"
    impact = TraceImpact(also_sets_sizes=True, patches_libraries=False)
