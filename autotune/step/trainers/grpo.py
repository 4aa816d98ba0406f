"""``GRPOTrainer``: prompts whose completions are generated."""

from __future__ import annotations

from autotune.step.trainers.groups import Groups


class GroupRelativePolicyOptimization(Groups):
    """The child's side of ``autotune.trainers.grpo``."""

    # GRPOTrainer._tokenize_prompts passes None for a row without images, at which processors raise a TypeError.
    images_in_every_row = True
