"""A script that trains LoRA on a 4-bit checkpoint and records the host's memory: MODEL, and an output file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, BitsAndBytesConfig


def collated(rows: list[list[int]]) -> Any:
    """Return the only row of a batch as a tensor."""
    return torch.tensor(rows)


def main(checkpoint: str, file: str) -> None:
    """Load, and train on rows of up to 2,048 tokens."""
    four_bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model: Any = AutoModelForCausalLM.from_pretrained(
        checkpoint, quantization_config=four_bits, dtype=torch.bfloat16, device_map={"": 0}
    )
    model = get_peft_model(prepare_model_for_kbit_training(model), LoraConfig(r=16, target_modules="all-linear"))
    model.train()
    optimizer = torch.optim.AdamW(each for each in model.parameters() if each.requires_grad)
    rows = [[1] * (64 + number) for number in range(1985)]
    for tokens in DataLoader(rows, batch_size=1, shuffle=True, collate_fn=collated):
        model(input_ids=tokens.cuda(), labels=tokens.cuda()).loss.backward()
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))
        Path(file).write_text(json.dumps({"anonymous_bytes": kib * 1024}), encoding="utf-8")
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main(*sys.argv[1:])
