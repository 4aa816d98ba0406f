"""The training loop of Lit-GPT's ``finetune/lora.py``, for a virtual device; the model is Lit-GPT's own.

Fabric is left out: it refuses a device that it does not know. What it does to memory stands in its place: modules are
made in bfloat16, outputs become float32 (``HalfPrecision.convert_output`` and ``BitsandbytesPrecision.convert_output``
of Lightning 2.1), and with a quantised model, every linear module is one of bitsandbytes', the head included.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from bitsandbytes.autograd import _functions as bnb_functions
from transformers import BitsAndBytesConfig
from transformers.integrations.bitsandbytes import replace_with_bnb_linear

from autotune.virtual import on_real_tensors, phase
from autotune.virtual.patches.quantized import fill_quantized
from benchmarks.published.measure import Shown, measured
from benchmarks.published.tables import Outcome

ITERATION = "first iteration"
"""Name of the phase. The longest sample is in the first iteration, by the loop's own design."""


def training(settings: Mapping[str, Any], counted: Callable[[int], None]) -> Callable[[torch.device], None]:
    """Return a function of a device that trains for the first iteration, which has the longest sample.

    Lit-GPT, at one of its commits of October 2023, has to be importable, and Lightning with it.

    Args:
        settings: of the table's loop, with those of a row over them.
        counted: is told the number of trainable parameters.
    """
    lora = importlib.import_module("lit_gpt.lora")
    utils = importlib.import_module("lit_gpt.utils")

    def run(device: torch.device) -> None:
        config = lora.Config.from_name(settings["model"], **settings["lora"])
        with _default_dtype(torch.bfloat16), torch.device("meta") if settings["quantize"] else device:
            model = lora.GPT(config)
        if settings["quantize"]:
            _quantize(model, settings["quantize"], device)
        lora.mark_only_lora_as_trainable(model)
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        counted(sum(parameter.numel() for parameter in trainable))
        optimizer = torch.optim.AdamW(trainable, lr=settings["learning_rate"], weight_decay=settings["weight_decay"])
        model.max_seq_length = settings["longest"]
        shape = settings["micro_batch"], settings["longest"]
        accumulated = settings["batch_size"] // settings["micro_batch"]
        with phase(ITERATION), _inputs_kept():
            ids = torch.randint(config.vocab_size, shape, device=device)
            targets = torch.randint(config.vocab_size, shape, device=device)
            logits = model(ids, lm_head_chunk_size=settings["lm_head_chunk_size"])
            logits = [chunk.float() for chunk in logits]
            logits[-1] = logits[-1][..., :-1, :]
            loss = utils.chunked_cross_entropy(logits, targets[..., 1:])
            (loss / accumulated).backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def outcome(settings: Mapping[str, Any], capability: tuple[int, int]) -> Outcome:
    """Trace a row, of the settings of the loop with its own over them."""
    return measured(training, figures, settings, capability)


def figures(shown: Shown) -> dict[str, int]:
    """Return the table's figure of a traced run."""
    return {"allocated": shown.peak_allocated_bytes}


def _quantize(model: torch.nn.Module, mode: str, device: torch.device) -> None:
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=mode.endswith("-dq"),
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    with on_real_tensors():
        replace_with_bnb_linear(model, quantization_config=config)
    fill_quantized(model, torch.bfloat16, device)
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.device.type == "meta" else tensor)


@contextmanager
def _inputs_kept() -> Iterator[None]:
    """Have 4-bit products keep their inputs for backward, as bitsandbytes did before its commit 9e753741 (2024)."""
    original = bnb_functions.MatMul4Bit.forward

    def forward(ctx: Any, a: torch.Tensor, *args: Any) -> torch.Tensor:
        output: torch.Tensor = original(ctx, a, *args)
        if ctx.tensors[1] is not None:
            ctx.tensors = (a, ctx.tensors[1])
        return output

    with mock.patch.object(bnb_functions.MatMul4Bit, "forward", staticmethod(forward)):
        yield


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
