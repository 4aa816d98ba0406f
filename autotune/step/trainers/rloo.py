"""``RLOOTrainer``: prompts whose completions are generated."""

from __future__ import annotations

from trl import RLOOConfig, RLOOTrainer
from trl.trainer import rloo_trainer

from autotune.step.trainers.groups import Groups


class LeaveOneOut(Groups):
    """The child's side of ``autotune.trainers.rloo``."""

    name = "rloo"
    config = RLOOConfig
    trainer = RLOOTrainer
    module = rloo_trainer


ADAPTER = LeaveOneOut()
