"""``RLOOTrainer``: REINFORCE with the other completions of a prompt as the baseline."""

from __future__ import annotations

from autotune.core.plan import TrainingPlan
from autotune.trainers.base import ConfigFields
from autotune.trainers.groups import FIELDS, TRACED, WITHOUT_EFFECT, Groups


class LeaveOneOut(Groups):
    """As GRPO, with a reference by default, and always with the old log-probabilities."""

    name = "rloo"
    label = "RLOO"
    title = "REINFORCE leave-one-out"
    config_class = "RLOOConfig"
    trainer_class = "RLOOTrainer"
    fields = FIELDS | {
        "normalize_advantages",
        "reward_clip_range",
    }
    config_fields = ConfigFields(
        traced=TRACED | {"normalize_advantages", "reward_clip_range"},
        without_effect=WITHOUT_EFFECT,
        assumed={"sync_ref_model": "the reference model is not synchronised in the traced steps"},
        reading=frozenset({"chat_template_kwargs"}),
    )  # fmt: skip

    def compares_with_old(self, plan: TrainingPlan, *, aligned: bool) -> bool:
        """RLOO always does."""
        return True


TRAINER = LeaveOneOut()
