"""Small models, tokenizers and datasets, built on demand; torch and transformers are imported only on use."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

VOCABULARY = 512
END = "<|end|>"
PADDING = "<|pad|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WORDS = (
    "memory", "speed", "batch", "length", "token", "packed", "padding", "model", "layer", "gradient", "optimizer",
    "state", "step", "warm", "device", "kernel", "the", "a", "of", "and", "in", "is", "that", "it", "for", "on", "with",
    "as", "was", "at", "by", "be", "this", "from", "or", "which", "one", "had", "not", "but", "what", "all", "were",
    "when", "there", "can",
)  # fmt: skip

_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "intermediate_size": 128}
_EMBEDDED = {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8, "sliding_window": 8}
_TURNS = ["sliding_attention", "full_attention"]
_MODELS: dict[str, dict[str, Any]] = {
    "llama": _HEADS,
    "qwen2": _HEADS,
    "mistral": {**_HEADS, "sliding_window": 8},
    "gemma2": {**_HEADS, "head_dim": 16, "sliding_window": 8},
    "qwen3_moe": {**_HEADS, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gpt_oss": {**_HEADS, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "opt": {"hidden_size": 64, "ffn_dim": 128, "num_attention_heads": 4, "word_embed_proj_dim": 64},
    "gpt2": {"n_embd": 64, "n_head": 4},
    # Layers of two types take turns, and the last ones share the keys and values of earlier ones.
    "gemma3n_text": {
        **_HEADS, **_EMBEDDED, "head_dim": 16, "laurel_rank": 8, "layer_types": _TURNS * 4, "num_kv_shared_layers": 4,
    },
    "gemma4_text": {
        **_HEADS, **_EMBEDDED, "head_dim": 16, "global_head_dim": 32, "layer_types": _TURNS * 8,
        "num_kv_shared_layers": 12, "use_double_wide_mlp": True,
    },
    # The first layers are dense.
    "ernie4_5_moe": {
        **_HEADS, "moe_intermediate_size": 32, "moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 3,
    },
    # Their classes compute the types of the layers from other fields.
    "jamba": {**_HEADS, "num_experts": 4, "attn_layer_period": 4, "attn_layer_offset": 2, "mamba_d_state": 4},
    "bamba": {**_HEADS, "mamba_n_heads": 8, "mamba_d_state": 16, "attn_layer_indices": [1, 4, 7]},
    "falcon_h1": {**_HEADS, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16},
    "rwkv": {"hidden_size": 64, "context_length": 64},
    "mamba": {"hidden_size": 64, "state_size": 4},
    "mamba2": {"hidden_size": 64, "state_size": 16, "num_heads": 8, "head_dim": 16, "n_groups": 1},
    "falcon_mamba": {"hidden_size": 64, "state_size": 4},
    # The layers that share attention are listed by their indices.
    "zamba2": {
        **_HEADS, "layers_block_type": ["mamba", "mamba", "mamba", "hybrid"] * 3, "mamba_d_state": 16,
        "adapter_rank": 8,
    },
    "recurrent_gemma": {**_HEADS, "lru_width": 64, "attention_window_size": 8},
    # The last layer has a bias that the others lack.
    "gpt_neox_japanese": {"hidden_size": 64, "num_attention_heads": 4},
}  # fmt: skip


def sentence(random_source: random.Random, words: int) -> str:
    """Return this number of random words."""
    return " ".join(random_source.choices(WORDS, k=words))


def long_tailed_texts(rows: int, *, seed: int = 7, median_words: int = 20, longest_words: int = 300) -> list[str]:
    """Return texts whose lengths are log-normal: most are short, a few are many times longer."""
    source = random.Random(seed)
    lengths = [min(longest_words, max(1, round(source.lognormvariate(0, 0.9) * median_words))) for _ in range(rows)]
    return [sentence(source, length) for length in lengths]


@cache
def _backend() -> str:
    """Return the JSON of a byte-level BPE tokenizer trained on the words of these datasets."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PADDING, END, "<|user|>", "<|assistant|>", "<|system|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    return tokenizer.to_str()


def small_tokenizer(*, chat_template: bool = True, **further: Any) -> Any:
    """Return a byte-level BPE tokenizer of at most :data:`VOCABULARY` tokens that can encode any text.

    Args:
        further: arguments of the tokenizer's class, such as words that it has in addition.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_backend()),
        eos_token=END,
        pad_token=PADDING,
        model_max_length=100_000,
        **further,
    )
    if chat_template:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def small_config(model_type: str = "llama", **changes: Any) -> Any:
    """Return a configuration of a small model: 2 layers, 64 wide, :data:`VOCABULARY` tokens; ``changes`` win."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        model_type,
        **{
            "vocab_size": VOCABULARY,
            "num_hidden_layers": 2,
            "max_position_embeddings": 2048,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 1,
            "tie_word_embeddings": True,
            **_MODELS.get(model_type, {}),
            **changes,
        },
    )
    config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
    return config


def write_small_model(
    directory: Path,
    model_type: str = "llama",
    *,
    weights: bool = True,
    tokenizer: bool = True,
    chat_template: bool = True,
    **changes: Any,
) -> Path:
    """Write a small model (its configuration, and if wanted its weights and a tokenizer) and return its directory."""
    import torch
    from transformers import AutoModelForCausalLM

    config = small_config(model_type, **changes)
    config.save_pretrained(directory)
    if weights:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    if tokenizer:
        small_tokenizer(chat_template=chat_template).save_pretrained(directory)
    return directory


def write_rows(file: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write rows as JSON lines and return the file."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def text_rows(texts: Sequence[str]) -> list[dict[str, Any]]:
    """Return the texts in TRL's ``text`` format."""
    return [{"text": text} for text in texts]


def messages_rows(texts: Sequence[str]) -> list[dict[str, Any]]:
    """Return the texts in TRL's ``messages`` format, as answers to short questions."""
    return [
        {"messages": [{"role": "user", "content": f"{i} ?"}, {"role": "assistant", "content": text}]}
        for i, text in enumerate(texts)
    ]


def prompt_completion_rows(texts: Sequence[str]) -> list[dict[str, Any]]:
    """Return the texts in TRL's standard ``prompt+completion`` format: a short prompt, the text as completion."""
    return [{"prompt": f"row {i} :", "completion": f" {text}"} for i, text in enumerate(texts)]


def preference_rows(texts: Sequence[str]) -> list[dict[str, Any]]:
    """Return the texts in TRL's standard preference format: a short prompt, a text chosen, the next one rejected."""
    pairs = zip(texts, [*texts[1:], *texts[:1]], strict=True)
    return [
        {"prompt": f"row {i} :", "chosen": f" {chosen}", "rejected": f" {rejected}"}
        for i, (chosen, rejected) in enumerate(pairs)
    ]
