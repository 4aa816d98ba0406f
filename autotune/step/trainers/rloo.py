"""``RLOOTrainer``: prompts whose completions are generated."""

from __future__ import annotations

from autotune.step.trainers.groups import Groups


class LeaveOneOut(Groups):
    """The child's side of ``autotune.trainers.rloo``."""
