"""``num_iterations``: how often the same completions are trained on."""

from __future__ import annotations

from autotune.techniques.base import POSITIVE, Effect, NumberTechnique, Option
from autotune.techniques.trace_impact import TraceImpact


class NumIterations(NumberTechnique):
    """Fewer generations for as many updates; all but the first update are on completions of an earlier model."""

    name = "num_iterations"
    summary = "Number of updates on the same completions, which share the time to generate them."
    options = (
        Option(1, "TRL's default: each completion is trained on once"),
        Option(2, "any number", Effect.CHANGES_TRAINING, family=POSITIVE),
    )
    writes = frozenset({"args.num_iterations"})
    changes = "completions are trained on again after the model that generated them has changed"
    impact = TraceImpact(also_sets_sizes=True, patches_libraries=False)
