"""``RLOOTrainer``: REINFORCE with the other completions of a prompt as the baseline."""

from __future__ import annotations

from dataclasses import replace

from autotune.core.plan import TrainingPlan
from autotune.trainers.groups import CONFIG_FIELDS, Groups


class LeaveOneOut(Groups):
    """As GRPO, with a reference by default, and always with the old log-probabilities."""

    name = "rloo"
    label = "RLOO"
    title = "REINFORCE leave-one-out"
    config_fields = replace(CONFIG_FIELDS, traced=CONFIG_FIELDS.traced | {"normalize_advantages", "reward_clip_range"})

    def compares_with_old(self, plan: TrainingPlan, *, aligned: bool) -> bool:
        """RLOO always does."""
        return True


TRAINER = LeaveOneOut()
