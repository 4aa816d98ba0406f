"""``SFTTrainer``: supervised fine-tuning."""

from __future__ import annotations

from autotune.trainers.base import Trainer

SFT = Trainer(
    name="sft",
    # transformers refuses bf16 without a GPU unless it is told that the CPU is meant (TrainingArguments).
    cpu_args={"use_cpu": True},
    # TRL's default, `device_map="auto"`, may put layers on the CPU where memory is short, instead of failing.
    cuda_args={"model_init_kwargs.device_map": None},
)
