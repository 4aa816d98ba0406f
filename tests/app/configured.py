"""Plans of configuration objects, for tests."""

from __future__ import annotations

from typing import Any

from trl import SFTConfig

from autotune.core.plan import TrainingPlan
from autotune.userconfig.fields import UserPlan
from autotune.userconfig.fields import user_plan as of_configuration
from autotune.userconfig.objects import configuration_of, peft_words


def sft(**options: Any) -> SFTConfig:
    """Return a configuration that can be made on a machine without a GPU."""
    return SFTConfig(**{"use_cpu": True, "bf16": False, "report_to": "none", **options})


def user_plan(config: object, peft_config: object | None) -> UserPlan:
    return of_configuration(configuration_of(config), peft_words(peft_config))


def plan_of(config: object, peft_config: object | None = None) -> TrainingPlan:
    return user_plan(config, peft_config).plan
