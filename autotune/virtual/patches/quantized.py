"""Fills bitsandbytes' linear modules with fake weights of the quantised sizes; the modules' own code runs on them."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from bitsandbytes import nn as bnb_nn
from bitsandbytes.functional import QuantState
from torch import nn

# bitsandbytes/functional.py, quantize_4bit: 64 weights share a float32 scale; with nested quantisation, scales take one
# byte each, and 256 of them share a float32 scale (quantize_blockwise). The codebooks have 16 and 256 entries.
_BLOCK = 64
_NESTED_BLOCK = 256
_CODE_4BIT = 16
_CODE_8BIT = 256
# Attributes that a ``Params4bit`` gets from its module.
_SETTINGS = ("quant_type", "compress_statistics", "quant_storage")

_namesakes: dict[tuple[str, type], type] = {}


def fill_quantized(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Replace the meta weights of bitsandbytes' modules by fake weights of the quantised sizes.

    Args:
        model: the result of transformers' ``replace_with_bnb_linear``.
        dtype: the dtype of the weights before quantisation, and of biases.
    """
    for module in model.modules():
        if not isinstance(module, (bnb_nn.Linear4bit, bnb_nn.Linear8bitLt)):
            continue
        if module.bias is not None:
            bias = torch.empty(module.out_features, dtype=dtype, device=device)
            module.bias = nn.Parameter(bias, requires_grad=False)
        if isinstance(module, bnb_nn.Linear4bit):
            module.weight = _weight_4bit(module, dtype, device)
            module.quant_state = module.weight.quant_state
        else:
            module.weight = _weight_8bit(module, device)


def _weight_4bit(module: Any, dtype: torch.dtype, device: torch.device) -> Any:
    before = module.weight
    stored = -(-before.numel() // 2 // module.quant_storage.itemsize)
    weight = _parameter(torch.empty(stored, 1, dtype=module.quant_storage, device=device), bnb_nn.Params4bit)
    for name in _SETTINGS:
        setattr(weight, name, getattr(before, name))
    weight.quant_state = _state(before, dtype, device)
    return weight


def _copied_4bit(weight: Any, memo: dict[int, Any]) -> Any:
    """Copy a weight and its quantisation state like ``Params4bit.__deepcopy__``; PEFT does this for DoRA."""
    copied = _parameter(weight.detach().clone(), bnb_nn.Params4bit)
    for name in (*_SETTINGS, "quant_state"):
        setattr(copied, name, deepcopy(getattr(weight, name), memo))
    return copied


def _weight_8bit(module: Any, device: torch.device) -> Any:
    weight = torch.empty(module.out_features, module.in_features, dtype=torch.int8, device=device)
    parameter = _parameter(weight, bnb_nn.Int8Params)
    parameter.CB, parameter.SCB = weight, _scales((module.out_features,), torch.float32, device)
    parameter.has_fp16_weights = False
    return parameter


def _parameter(weight: torch.Tensor, kind: type[Any]) -> Any:
    """Return a frozen parameter whose class name libraries recognise as one of bitsandbytes."""
    parameter = nn.Parameter(weight, requires_grad=False)
    key = kind.__name__, type(parameter)
    # FSDP reads parts of the quantisation state through properties of the parameter.
    named = {name: item for name, item in vars(kind).items() if isinstance(item, property)}
    own = {**named, "__deepcopy__": _copied_4bit} if kind is bnb_nn.Params4bit else {}
    parameter.__class__ = _namesakes.setdefault(key, type(kind.__name__, (type(parameter),), own))
    return parameter


def _scales(count: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return scales or codebooks, tagged as part of a parameter."""
    tensor = torch.empty(count, dtype=dtype, device=device)
    tensor._is_param = True
    return tensor


def _state(weight: Any, dtype: torch.dtype, device: torch.device) -> QuantState:
    """Return the quantisation state for a weight on the meta device."""
    blocks = -(-weight.numel() // _BLOCK)
    nested = weight.compress_statistics

    def floats(*count: int) -> torch.Tensor:
        return _scales(count, torch.float32, device)

    outer = None
    if nested:
        outer = QuantState(
            floats(-(-blocks // _NESTED_BLOCK)), code=floats(_CODE_8BIT), blocksize=_NESTED_BLOCK, dtype=torch.float32
        )
    return QuantState(
        absmax=_scales((blocks,), torch.uint8, device) if nested else floats(blocks),
        shape=weight.shape,
        code=floats(_CODE_4BIT),
        blocksize=_BLOCK,
        quant_type=weight.quant_type,
        dtype=dtype,
        offset=floats() if nested else None,
        state2=outer,
    )
