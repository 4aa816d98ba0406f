"""``RLOOTrainer``: prompts whose completions are generated."""

from __future__ import annotations

from trl import RLOOConfig, RLOOTrainer

from autotune.step.trainers.groups import Groups


class LeaveOneOut(Groups):
    """The child's side of ``autotune.trainers.rloo``."""

    name = "rloo"
    config = RLOOConfig
    trainer = RLOOTrainer


ADAPTER = LeaveOneOut()
