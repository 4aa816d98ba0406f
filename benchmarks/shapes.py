"""Workloads built on demand without a network: shapes of published models, and the examples' small one."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

SMALL_WORKLOAD = Path(__file__).resolve().parents[1] / "examples" / "small_workload.py"
_SPECIAL = {"<end>": 0, "<pad>": 1, "<unknown>": 2}
LETTER = "a"
"""The only letter of the tokenizers' vocabulary: each is a token. Rows that stand in for a dataset have it, too."""


def _qwen(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, *, tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": 151936 if tied else 152064,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": tied,
        "eos_token_id": _SPECIAL["<end>"],
        "pad_token_id": _SPECIAL["<pad>"],
    }


LLAMA_8B: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "eos_token_id": _SPECIAL["<end>"],
    "pad_token_id": _SPECIAL["<pad>"],
}
"""The config.json of Llama-3.1-8B (https://huggingface.co/meta-llama/Llama-3.1-8B)."""
LLAMA_70B: Mapping[str, Any] = {
    **LLAMA_8B,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
"""The config.json of Llama-3.1-70B (https://huggingface.co/meta-llama/Llama-3.1-70B)."""

CONFIGURATIONS: Mapping[str, Mapping[str, Any]] = {
    "qwen2.5-0.5b": _qwen(896, 4864, 24, 14, 2, tied=True),
    "qwen2.5-1.5b": _qwen(1536, 8960, 28, 12, 2, tied=True),
    "qwen2.5-7b": _qwen(3584, 18944, 28, 28, 4, tied=False),
    "llama-3.2-1b": {
        **LLAMA_8B, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "qwen3-0.6b": {
        **_qwen(1024, 3072, 28, 16, 8, tied=True), "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
        "head_dim": 128, "max_position_embeddings": 40960,
    },
    "gemma-3-1b": {
        **_qwen(1152, 6912, 26, 4, 1, tied=True), "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text",
        "head_dim": 256, "vocab_size": 262144, "sliding_window": 512, "query_pre_attn_scalar": 256,
    },
    "smollm2-135m": {
        **LLAMA_8B, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    },
    "olmoe-1b-7b": {
        **LLAMA_8B, "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "hidden_size": 2048,
        "intermediate_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16,
        "vocab_size": 50304, "max_position_embeddings": 4096, "num_experts": 64, "num_experts_per_tok": 8,
    },
}  # fmt: skip
"""By name, what the models' own config.json files on the Hub say (https://huggingface.co): their sizes."""


def write_model(directory: Path, configuration: Mapping[str, Any]) -> Path:
    """Write a configuration and a small tokenizer, and return the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(configuration, indent=1), encoding="utf-8")
    write_tokenizer(directory)
    return directory


def write_tokenizer(
    directory: Path, further: Mapping[str, int] | None = None, names: Mapping[str, str] | None = None
) -> Any:
    """Write a tokenizer of one letter and return it.

    Args:
        further: special tokens that it has, with their numbers.
        names: those of them that a model's processor asks for, by its names for them.
    """
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    # The model that Qwen's tokenizers have, whatever is in the file: transformers loads no other for its architectures.
    tokenizer = Tokenizer(models.BPE({**_SPECIAL, LETTER: len(_SPECIAL), **(further or {})}, []))
    tokenizer.add_special_tokens([*(further or {})])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>", extra_special_tokens=dict(names or {})
    )
    wrapped.save_pretrained(directory)
    return wrapped


def write_rows(file: Path, lengths: Iterable[int], vocabulary: int) -> Path:
    """Write rows of this number of random tokens each, and return the file."""
    source = random.Random(0)
    with file.open("w", encoding="utf-8") as lines:
        for length in lengths:
            tokens = [source.randrange(len(_SPECIAL), vocabulary) for _ in range(length)]
            lines.write(json.dumps({"input_ids": tokens}) + "\n")
    return file


def small_workload(directory: Path) -> tuple[Path, Path]:
    """Build the examples' small workload, and return the model's directory and the dataset's file."""
    subprocess.run([sys.executable, str(SMALL_WORKLOAD), str(directory)], stdout=subprocess.DEVNULL, check=True)
    return directory / "model", directory / "data.jsonl"
