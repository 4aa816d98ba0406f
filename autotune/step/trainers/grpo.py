"""``GRPOTrainer``: prompts whose completions are generated."""

from __future__ import annotations

from autotune.step.trainers.groups import Groups


class GroupRelativePolicyOptimization(Groups):
    """The child's side of ``autotune.trainers.grpo``."""
