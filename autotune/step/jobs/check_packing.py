"""The job ``check_packing``: checks that each attention trains, and keeps packed documents separate."""

from __future__ import annotations

import math
from typing import Any

import torch

from autotune.core.jobs.protocol import CheckPackingRequest
from autotune.core.machine import DeviceKind
from autotune.core.workload import PackingCheck
from autotune.errors import first_line
from autotune.step.job import JobContext
from autotune.step.models.loading import load_config, model_class
from autotune.step.models.shrink import shrunken_model
from autotune.step.trainers import find_adapter
from autotune.step.trainers.packing import packed_input, single_input

# Lengths below and above the shrunken sliding window (8), a single token, and otherwise none that divides another. They
# sum to at least 128: below, FlexAttention uses another kernel, which fails for grouped-query attention
# ("NoValidChoicesError"; seen on an H200).
_DOCUMENT_TOKENS = (7, 19, 1, 12, 33, 29, 30)
_LAYERS = 2
_SEED = 0
# Largest difference that counts as rounding, as a share of the largest logit. Documents that attend to
# each other differ by about the logits themselves. In float32 the observed rounding error is below 1e-5; bfloat16 keeps
# 8 bits, and two layers are allowed ten times its rounding of 2**-8.
_TOLERANCES = {"float32": 1e-4, "bfloat16": 0.04}
_REASON_CHARACTERS = 300


def check_packing(request: CheckPackingRequest, _: JobContext) -> tuple[PackingCheck, ...]:
    """Compare the logits of packed documents with those of each document alone, for each attention implementation.

    Raises:
        InputError: the model's configuration cannot be used.
    """
    config = load_config(request.model, find_adapter(request.trainer).head)
    architecture = model_class(config)
    return tuple(
        _check(architecture, config, attention, request.device, packs=request.packs) for attention in request.attentions
    )


def _check(architecture: type[Any], config: Any, attention: str, device: DeviceKind, *, packs: bool) -> PackingCheck:
    """Check one attention implementation; without packing, only that it runs forward and backward."""
    # FlashAttention has kernels for 16 bits only; all others are compared in float32.
    dtype = "bfloat16" if "flash" in attention else "float32"
    torch.manual_seed(_SEED)
    try:
        model = shrunken_model(architecture, config, layers=_LAYERS, attention=attention, dtype=dtype)
        chosen = model.config._attn_implementation
        if chosen != attention:
            # `_compatible_flash_implementations` of a class (`modeling_utils.py` of transformers).
            return PackingCheck(attention, False, False, None, 0.0, f"transformers silently takes {chosen} instead")
        _randomize(model)
        model.eval().to(device)
        vocabulary = model.get_input_embeddings().weight.shape[0]
        documents = [torch.randint(3, vocabulary, (count,)).tolist() for count in _DOCUMENT_TOKENS]
        separately = [_logits(model, single_input(document)) for document in documents]
        separately[0].sum().backward()
    except Exception as error:  # noqa: BLE001 any error means that this attention does not train here
        return PackingCheck(attention, False, False, None, 0.0, f"a short run ends with {_error_text(error)}")
    if not packs:
        return PackingCheck(attention, True, False, None, 0.0, "TRL does not pack these rows")
    separate = torch.cat(separately).detach()
    largest = separate.abs().max().item()
    if not math.isfinite(largest):
        return PackingCheck(attention, True, False, None, 0.0, "documents give logits that are not finite")
    tolerance = _TOLERANCES[dtype] * largest
    try:
        together = _logits(model, packed_input(documents))
    except Exception as error:  # noqa: BLE001 an architecture that refuses packed documents does not mix them either
        return PackingCheck(attention, True, False, None, tolerance, f"refuses packed documents: {_error_text(error)}")
    difference = (together.detach() - separate).abs().max().item()
    if not math.isfinite(difference):
        return PackingCheck(attention, True, False, None, tolerance, "packed documents give logits that are not finite")
    separates = difference <= tolerance
    reason = "" if separates else f"packed and separate logits differ by up to {difference:.3g}"
    return PackingCheck(attention, True, separates, difference, tolerance, reason)


def _randomize(model: Any) -> None:
    """Draw weights that preserve the scale of activations, so that attention affects the logits."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)


def _logits(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """Return the logits of one row, one line per token, in float32."""
    placed = {name: value.to(model.device) if hasattr(value, "to") else value for name, value in inputs.items()}
    # Like a trainer on packed rows: no attention mask, and no cache, which would prevent the separation of documents.
    return model(**placed, use_cache=False).logits[0].float()


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"[:_REASON_CHARACTERS]
