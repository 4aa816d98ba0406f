"""A script of transformers' Trainer: ``autotune dry-run --gpu 24GiB -- python trainer.py``.

With several processes: ``autotune dry-run --gpu 24GiB -- accelerate launch --config_file fsdp2.yaml trainer.py``.
"""

from __future__ import annotations

import sys

from datasets import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

ROWS, LONGEST = 512, 1024


def collated(rows: list[dict[str, list[int]]]) -> dict[str, object]:
    """Pad the rows of a batch."""
    import torch

    longest = max(len(row["input_ids"]) for row in rows)
    tokens = torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows])
    mask = torch.tensor([[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in rows])
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens}


def main() -> None:
    """Train a small Llama on made-up tokens; the longest row is the last."""
    config = LlamaConfig(
        vocab_size=8192, hidden_size=512, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=8
    )
    lengths = [*(32 + number % 64 for number in range(ROWS - 1)), LONGEST]
    arguments = TrainingArguments(
        output_dir=sys.argv[1] if len(sys.argv) > 1 else "out",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        bf16=True,
        report_to="none",
    )
    trainer = Trainer(
        AutoModelForCausalLM.from_config(config),
        arguments,
        data_collator=collated,
        train_dataset=Dataset.from_dict({"input_ids": [[1] * length for length in lengths]}),
    )
    trainer.train()


if __name__ == "__main__":
    main()
