"""``GRPOTrainer``: prompts whose completions are generated."""

from __future__ import annotations

from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer

from autotune.step.trainers.groups import Groups


class GroupRelativePolicyOptimization(Groups):
    """The child's side of ``autotune.trainers.grpo``."""

    name = "grpo"
    config = GRPOConfig
    trainer = GRPOTrainer
    module = grpo_trainer
    # GRPOTrainer._tokenize_prompts makes None of no images, which processors take for no row among others.
    every_row_pictured = True


ADAPTER = GroupRelativePolicyOptimization()
