"""The models and micro-batches of each row of the published speeds."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from autotune.inspection.gpus import listed_gpu
from benchmarks.published.metamathqa import training
from benchmarks.published.tables import load
from benchmarks.published.trainings import SHAPES, VOCABULARY, Step, hugging_face, mpt, plain_gpt

_ADAMW_PASSES = 20
"""Times that AdamW reads or writes a float32 parameter, gradient or state, one tensor after another."""
_COPIED_BYTES = 8
"""What FSDP moves on the device for each parameter of a micro-batch.

All bfloat16: the gradients of a layer's parameters are concatenated, as the backward pass of the split of its flat
parameter, and divided before they are reduced (``_reduce_grad`` of torch/distributed/fsdp/_runtime_utils.py).
"""
_TRITON_OF_FLASH = {"attention": 0.37 / 0.66, "backward_attention": 0.68 / 0.75}
"""Rates of FlashAttention 1 in Triton, which llm-foundry's rows ran (``attn_impl`` of
scripts/train/benchmarking/submit_benchmarks.py), as multiples of FlashAttention 2's: on an A100 by `operators.md`, and
taken to be the same on an H100, for which both lack instructions."""
_TRITON_TOKENS = 220.0
_GPT3 = {"1.3": (2048, 16, 24), "2.7": (2560, 32, 32)}
_BERT: Mapping[str, Mapping[str, Any]] = {
    "base": {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
    "large": {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096},
}
_BERT_LAYERS = {"base": 12, "large": 24}
# NeuSight, scripts/asplos/data/DLmodel_configs: the class, the name of the number of layers, that number, the rest.
_NEUSIGHT: Mapping[str, tuple[str, str, int, Mapping[str, Any]]] = {
    "bert_large": ("BertLMHeadModel", "num_hidden_layers", 24, {"model_type": "bert", **_BERT["large"]}),
    "gpt2_large": ("GPT2LMHeadModel", "n_layer", 36, {"model_type": "gpt2", "n_embd": 1280, "n_head": 20}),
    "gpt3_xl": ("GPT2LMHeadModel", "n_layer", 24, {"model_type": "gpt2", "n_embd": 3072, "n_head": 24}),
    "gpt3_27": ("GPT2LMHeadModel", "n_layer", 32, {"model_type": "gpt2", "n_embd": 2560, "n_head": 32}),
    "opt_13": (
        "OPTForCausalLM", "num_hidden_layers", 24,
        {"model_type": "opt", "hidden_size": 2048, "ffn_dim": 8192, "num_attention_heads": 32, "vocab_size": 50272,
         "max_position_embeddings": 2048, "word_embed_proj_dim": 2048},
    ),
}  # fmt: skip
_ALPACA_TOKENS = {1: 120, 2: 170, 4: 220}
"""Tokens of the longest of so many rows of Alpaca, on average: assumed. The host takes longer than the device."""
_CARDS = {
    "a100_80gb": "A100-80GB", "a100_40gb": "A100-40GB", "h100_80gb": "H100-SXM", "A100-80G": "A100-80GB",
    "NVIDIA_L4": "L4", "NVIDIA_H100_80GB_HBM3": "H100-SXM", "Tesla_V100-PCIE-32GB": "V100-PCIe-32GB",
    "NVIDIA_A100_80GB_PCIe": "A100-PCIe-80GB",
}  # fmt: skip


@dataclass(frozen=True)
class Published:
    """One published speed, and how its step is traced.

    Attributes:
        seconds: of an optimizer step, as measured.
        gpu: name in the catalogue; "" where it is not in it.
        layers: of the whole model.
        training: the same for rows that differ in the GPU and, where it is named, the batch alone.
        rows: of a step, where rows of one training differ in it.
        step: returns the passes of a micro-batch with so many layers; None where the setting is not known.
        phase: the part of the trace that counts; "": all of it.
        micro_batches: of an optimizer step.
        gpus: processes.
        rates: achieved rates of what ran in place of the kernels that the catalogue's are of.
        gathered_bytes: weights that are gathered for each micro-batch twice, and gradients that are scattered once.
        copied_bytes: what FSDP reads and writes on the device for each micro-batch.
        updated_bytes: float32 parameters of each process that AdamW updates.
    """

    table: str
    name: str
    kind: str
    seconds: float
    gpu: str
    layers: int = 0
    training: str = ""
    rows: int = 1
    step: Callable[[int], Step] | None = None
    phase: str = ""
    micro_batches: int = 1
    gpus: int = 1
    rates: Mapping[str, Any] = field(default_factory=dict, hash=False)
    gathered_bytes: int = 0
    copied_bytes: int = 0
    updated_bytes: int = 0

    @property
    def pass_bytes(self) -> int:
        """Bytes that the optimizer reads and writes on the device."""
        return self.updated_bytes * _ADAMW_PASSES


def published(row: Mapping[str, str]) -> Published:
    """Return a row of ``speeds.csv``."""
    count, card = row["hardware"].split("x ", 1)
    found = Published(
        row["source"], row["row"], row["kind"], float(row["seconds_measured"]), _CARDS.get(card, card), gpus=int(count)
    )
    reader = next((read for start, read in _READERS.items() if row["source"].startswith(start)), None)
    return found if reader is None else reader(found)


def _mpt(row: Published) -> Published:
    words = re.match(r"MPT-(\w+) seq (\d+) x\d+ mb (\d+) ga (\d+) ckpt (\w+)", row.name)
    assert words is not None
    (width, heads, layers), tokens, rows = SHAPES[words[1]], int(words[2]), int(words[3])
    parameters = 12 * width**2 * layers + VOCABULARY * width
    return replace(
        row,
        layers=layers,
        training=row.name,
        step=lambda count: mpt(width, heads, count, rows, tokens, checkpoints=words[5] == "on"),
        micro_batches=int(words[4]),
        rates=_triton(row.gpu),
        gathered_bytes=2 * parameters,
        copied_bytes=_COPIED_BYTES * parameters,
        updated_bytes=4 * parameters // row.gpus,
    )


def _triton(card: str) -> Mapping[str, Any]:
    gpu = listed_gpu(card)
    assert gpu is not None
    assert gpu.speeds is not None
    shares = {name: ratio * getattr(gpu.speeds.achieved, name) for name, ratio in _TRITON_OF_FLASH.items()}
    return {**shares, "attention_tokens": _TRITON_TOKENS, "attention_kernels": {}}


def _flash_attention(row: Published) -> Published:
    words = re.match(r"GPT3-(\S+)B (\d+) (.*)", row.name)
    assert words is not None
    (width, heads, layers), tokens = _GPT3[words[1]], int(words[2])
    rows = 8 if tokens == 2048 else 2
    fused = words[3] == "FA2"
    return replace(row, layers=layers, step=lambda count: plain_gpt(width, heads, count, rows, tokens, fused=fused))


def _neusight(row: Published) -> Published:
    words = re.match(r"(\w+)-train-(\d+)-(\d+) on", row.name)
    assert words is not None
    kind, key, layers, settings = _NEUSIGHT[words[1]]
    tokens, rows = int(words[2]), int(words[3])
    if settings["model_type"] == "gpt2":
        settings = {**settings, "n_positions": tokens}
    return replace(
        row,
        layers=layers,
        training=words[0],
        step=lambda count: hugging_face(kind, {**settings, key: count}, rows, tokens, torch.float32),
    )


def _lambda(row: Published) -> Published:
    words = re.match(r"BERT-(\w+) seq (\d+) bs (\d+) on", row.name)
    assert words is not None
    settings, tokens, rows = {"model_type": "bert", **_BERT[words[1]]}, int(words[2]), int(words[3])
    layers, width = _BERT_LAYERS[words[1]], int(settings["hidden_size"])
    return replace(
        row,
        layers=layers,
        training=f"BERT-{words[1]} {tokens}",
        rows=rows,
        step=lambda count: hugging_face(
            "BertForQuestionAnswering", {**settings, "num_hidden_layers": count}, rows, tokens, torch.float16
        ),
        updated_bytes=4 * 12 * width**2 * layers,
    )


def _peft(row: Published) -> Published:
    table = load("metamathqa")
    known = {each.name: each.settings for each in table.rows}
    if row.name not in known:
        return row
    settings = {**table.loop, **known[row.name]}
    settings["longest_lengths"] = settings["average_lengths"]
    layers = int(settings["model"]["num_hidden_layers"])

    def step(count: int) -> Step:
        model = {**settings["model"], "num_hidden_layers": count}
        return training({**settings, "model": model}, lambda _: None)

    return replace(row, layers=layers, step=step, phase="average")


def _litgpt(row: Published) -> Published:
    if find_spec("lit_gpt") is None:
        return row
    # It needs bitsandbytes.
    from benchmarks.published import litgpt

    table = load("litgpt")
    settings = {**table.loop, **next(each.settings for each in table.rows if each.name == row.name)}
    settings["longest"] = _ALPACA_TOKENS[settings["micro_batch"]]
    layers = import_module("lit_gpt").Config.from_name(settings["model"]).n_layer

    def step(count: int) -> Step:
        return litgpt.training({**settings, "lora": {**settings["lora"], "n_layer": count}}, lambda _: None)

    return replace(row, layers=layers, step=step, phase=litgpt.ITERATION)


_READERS: Mapping[str, Callable[[Published], Published]] = {
    "llm-foundry": _mpt,
    "FlashAttention-2": _flash_attention,
    "NeuSight": _neusight,
    "Lambda": _lambda,
    "PEFT": _peft,
    "Lit-GPT": _litgpt,
}
