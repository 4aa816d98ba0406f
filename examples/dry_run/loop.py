"""A plain training loop, whose longest row is its last: ``autotune dry-run --gpu 24GiB -- python loop.py``."""

from __future__ import annotations

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig

ROWS, LONGEST, BATCH = 256, 1024, 4


def main() -> None:
    """Train a small Llama on made-up tokens."""
    config = LlamaConfig(
        vocab_size=8192, hidden_size=512, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=8
    )
    rows = [torch.ones(32 + number % 64, dtype=torch.long) for number in range(ROWS - 1)]
    rows.append(torch.ones(LONGEST, dtype=torch.long))
    loader = DataLoader(rows, batch_size=BATCH, collate_fn=lambda batch: pad_sequence(batch, batch_first=True))
    model = AutoModelForCausalLM.from_config(config).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in loader:
        tokens = batch.cuda()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
