"""Training steps of the published speeds: a plain GPT and models of transformers, on the virtual device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Step = Callable[[torch.device], None]

SHAPES: Mapping[str, tuple[int, int, int]] = {
    "125m": (768, 12, 12),
    "350m": (1024, 16, 24),
    "760m": (1536, 12, 24),
    "1b": (2048, 16, 24),
    "3b": (2560, 20, 32),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 56, 48),
    "70b": (8192, 64, 80),
}
"""Width, heads and layers of MPT (llm-foundry, ``scripts/train/yamls/pretrain``)."""
VOCABULARY = 50368
_METRICS = 2


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, *, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = hidden.shape
        mixed = self.qkv(self.norms[0](hidden)).view(rows, tokens, 3, self.heads, width // self.heads)
        query, key, value = mixed.permute(2, 0, 3, 1, 4).unbind(0)
        if self.fused:
            attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            scores = (query @ key.transpose(-1, -2)) * (width // self.heads) ** -0.5
            hidden_part = torch.ones(tokens, tokens, dtype=torch.bool, device=scores.device).triu(1)
            attended = scores.masked_fill(hidden_part, float("-inf")).softmax(-1) @ value
        hidden = hidden + self.out(attended.transpose(1, 2).reshape(rows, tokens, width))
        return hidden + self.down(functional.gelu(self.up(self.norms[1](hidden))))


class PlainGpt(nn.Module):
    """A decoder with learned positions, LayerNorm, GELU, and a head that is tied to the embedding."""

    def __init__(self, width: int, heads: int, layers: int, tokens: int, *, fused: bool, checkpoints: bool) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.embedding, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(_Block(width, heads, fused=fused) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits of token ids, [rows, tokens], end to end."""
        hidden = self.embedding(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.checkpoints else block(hidden)
        return functional.linear(self.norm(hidden), self.embedding.weight).flatten(0, 1)


class _FusedLoss(torch.autograd.Function):
    """Passes over logits as the fused cross-entropy of flash-attention does (csrc/xentropy of version 1.0.9).

    They are read for their maximum and for their sum, and once more in the backward pass, which writes the gradient.
    """

    @staticmethod
    def forward(context: Any, logits: torch.Tensor) -> torch.Tensor:
        """Return a number that depends on all logits."""
        context.save_for_backward(logits)
        return (logits.amax(-1) + logits.sum(-1)).mean()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Return a tensor in the logits' place."""
        (logits,) = context.saved_tensors
        product: torch.Tensor = logits * gradient
        return product


def plain_gpt(
    width: int, heads: int, layers: int, rows: int, tokens: int, *, fused: bool = True, checkpoints: bool = False
) -> Step:
    """Return forward and backward passes of a micro-batch of a plain GPT in bfloat16."""

    def run(device: torch.device) -> None:
        with device:
            model = PlainGpt(width, heads, layers, tokens, fused=fused, checkpoints=checkpoints).to(torch.bfloat16)
            ids = torch.zeros(rows, tokens, dtype=torch.long)
        functional.cross_entropy(model(ids), ids.flatten()).backward()

    return run


def mpt(width: int, heads: int, layers: int, rows: int, tokens: int, *, checkpoints: bool) -> Step:
    """Return the passes of a micro-batch of MPT as Composer trains it: with a fused loss, then two metrics.

    ``ComposerMPTCausalLM`` of llm-foundry 0.3 has ``LanguageCrossEntropy`` and ``LanguagePerplexity`` as metrics of a
    training, and Composer 0.16 (``_eval_train_metrics``) computes both for each micro-batch: a cross-entropy of all
    logits, which autocast turns into float32.
    """

    def run(device: torch.device) -> None:
        with device:
            model = PlainGpt(width, heads, layers, tokens, fused=True, checkpoints=checkpoints).to(torch.bfloat16)
            ids = torch.zeros(rows, tokens, dtype=torch.long)
        logits = model(ids)
        _FusedLoss.apply(logits).backward()
        with torch.no_grad():
            for _ in range(_METRICS):
                functional.cross_entropy(logits.float(), ids.flatten(), reduction="sum")

    return run


def hugging_face(kind: str, settings: Mapping[str, Any], rows: int, tokens: int, dtype: torch.dtype) -> Step:
    """Return forward and backward passes of a micro-batch of a model of transformers, with eager attention.

    Args:
        kind: the class of the model.
    """

    def run(device: torch.device) -> None:
        import transformers
        from transformers.initialization import no_init_weights

        model_type = {"bert": "Bert", "gpt2": "GPT2", "opt": "OPT"}[settings["model_type"]]
        config = getattr(transformers, f"{model_type}Config")(**settings, attn_implementation="eager")
        with device, no_init_weights():
            model = getattr(transformers, kind)._from_config(config, dtype=dtype)
        model.train()
        with device:
            ids = torch.zeros(rows, tokens, dtype=torch.long)
            labels = torch.zeros(rows, dtype=torch.long)
        extra = {"start_positions": labels, "end_positions": labels} if "Question" in kind else {"labels": ids}
        model(input_ids=ids, attention_mask=torch.ones_like(ids), **extra).loss.backward()

    return run
