"""Checkpoints with the sizes of large models that take no disk space: their weights are holes in a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def llama_70b() -> Any:
    """Return the configuration of a Llama with 70B parameters."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=128_256,
        hidden_size=8192,
        intermediate_size=28_672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    )


def write_sparse(folder: Path, config: Any) -> int:
    """Write a checkpoint in bfloat16, tied weights once as transformers does, and return the bytes of its weights.

    The file is one of safetensors: the length of a header as 8 bytes, the header as JSON, and the weights.
    """
    import torch
    from transformers import AutoModelForCausalLM

    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    weights = {name: each for name, each in model.state_dict().items() if name not in model.all_tied_weights_keys}
    for name, weight in weights.items():
        start, end = end, end + weight.numel() * weight.element_size()
        header[name] = {"dtype": "BF16", "shape": list(weight.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(file.tell() + end)
    return end
