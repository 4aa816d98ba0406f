"""GRPO of TRL with a reward function of its own: ``autotune dry-run --gpu 24GiB -- python grpo.py MODEL``."""

from __future__ import annotations

import sys
from typing import Any

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

PROMPTS, COMPLETION = 64, 48


def brief(completions: list[str], **_: Any) -> list[float]:
    """Reward short completions; on a null GPU, the first of a batch is a token longer than the others."""
    return [-float(len(each)) for each in completions]


def prompts() -> list[str]:
    """Return made-up prompts; the longest are the last."""
    return ["the batch is in the memory " * (1 + number // 8) for number in range(PROMPTS)]


def main(model: str, output: str = "out") -> None:
    """Train on the prompts."""
    trainer = GRPOTrainer(
        model,
        reward_funcs=brief,
        args=GRPOConfig(
            output_dir=output,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=COMPLETION,
            beta=0.04,
            report_to="none",
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts()}),
    )
    trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
