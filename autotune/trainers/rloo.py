"""``RLOOTrainer``: REINFORCE with the other completions of a prompt as the baseline."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.core.plan import TrainingPlan
from autotune.techniques.steps_per_generation import NAME as GENERATED_TOGETHER
from autotune.trainers.declared import ConfigFields
from autotune.trainers.groups import GROUPS_FIELDS, Groups


class LeaveOneOut(Groups):
    """Like GRPO, but with a reference by default, and always with old log-probabilities."""

    label = "RLOO"
    title = "REINFORCE leave-one-out"
    config_fields = GROUPS_FIELDS | ConfigFields(traced=frozenset({"normalize_advantages", "reward_clip_range"}))

    def own_loss(self, args: Mapping[str, object]) -> Mapping[str, str]:
        """Return the dependence on a generation batch, over which advantages may be normalised."""
        if not args.get("normalize_advantages"):
            return {}
        return {GENERATED_TOGETHER: "advantages are normalised over the completions that are generated at once"}

    def compares_with_old(self, plan: TrainingPlan, *, aligned: bool) -> bool:
        """RLOO always does."""
        return True


TRAINER = LeaveOneOut()
