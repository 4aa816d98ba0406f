"""bitsandbytes' linear modules on fake tensors: their own code runs on fake weights of the right sizes."""

from __future__ import annotations

from typing import Any

import torch
from bitsandbytes import MatmulLtState
from bitsandbytes import nn as bnb_nn
from bitsandbytes.functional import QuantState
from torch import nn

# bitsandbytes/functional.py, quantize_4bit: 64 weights share a float32 scale; with nested quantisation the scales are
# bytes, and 256 of them share one scale (quantize_blockwise). The codebooks have 16 and 256 entries.
_BLOCK = 64
_NESTED_BLOCK = 256
_CODE_4BIT = 16
_CODE_8BIT = 256

_namesakes: dict[tuple[str, type], type] = {}


class VirtualLinear4bit(bnb_nn.Linear4bit):
    """A ``Linear4bit`` with fake weights on the virtual device."""

    def __init__(self, linear: nn.Linear, config: Any, dtype: torch.dtype, device: torch.device) -> None:
        nn.Module.__init__(self)
        _take_over(self, linear, dtype, device)
        self.compute_dtype = config.bnb_4bit_compute_dtype
        self.compute_type_is_set = config.bnb_4bit_compute_dtype is not None
        self.quant_state = None
        self.quant_storage = config.bnb_4bit_quant_storage
        self.support_avx512bf16_for_cpu = False
        numbers = linear.in_features * linear.out_features
        stored = -(-numbers // 2 // self.quant_storage.itemsize)
        weight = torch.empty(stored, 1, dtype=self.quant_storage, device=device)
        self.weight = _parameter(weight, bnb_nn.Params4bit)
        self.weight.quant_state = _state(linear, config, dtype, device)
        self.weight.quant_type = config.bnb_4bit_quant_type
        self.weight.compress_statistics = config.bnb_4bit_use_double_quant
        self.weight.quant_storage = self.quant_storage


class VirtualLinear8bit(bnb_nn.Linear8bitLt):
    """A ``Linear8bitLt`` with fake weights on the virtual device."""

    def __init__(self, linear: nn.Linear, config: Any, dtype: torch.dtype, device: torch.device) -> None:
        nn.Module.__init__(self)
        _take_over(self, linear, dtype, device)
        self.index = None
        self.state = MatmulLtState()
        self.state.threshold = config.llm_int8_threshold
        self.state.has_fp16_weights = False
        self.state.use_pool = True
        weight = torch.empty(linear.out_features, linear.in_features, dtype=torch.int8, device=device)
        self.weight = _parameter(weight, bnb_nn.Int8Params)
        self.weight.CB = weight
        self.weight.SCB = _scales((linear.out_features,), torch.float32, device)
        self.weight.has_fp16_weights = False


def quantize(model: nn.Module, config: Any, dtype: torch.dtype, device: torch.device, kept: list[str]) -> None:
    """Replace a model's linear modules as transformers' ``replace_with_bnb_linear`` does.

    Args:
        model: a model of fake tensors.
        config: a ``transformers.BitsAndBytesConfig``.
        dtype: the type of the weights before quantisation.
        kept: names of the modules that are not quantised, such as the head.
    """
    kind = VirtualLinear8bit if config.quantization_method() == "llm_int8" else VirtualLinear4bit
    for name, module in quantized_modules(model, kept):
        model.set_submodule(name, kind(module, config, dtype, device))


def quantized_modules(model: nn.Module, kept: list[str]) -> list[tuple[str, nn.Linear]]:
    """Return the linear modules of a model that are quantised, with their names.

    Args:
        kept: names of the modules that are not quantised, such as the head.
    """
    from transformers.quantizers.quantizers_utils import should_convert_module

    every = model.named_modules()
    return [(name, each) for name, each in every if type(each) is nn.Linear and should_convert_module(name, kept)]


def _take_over(module: Any, linear: nn.Linear, dtype: torch.dtype, device: torch.device) -> None:
    module.in_features, module.out_features = linear.in_features, linear.out_features
    module.source_cls = type(linear)
    bias = torch.empty(linear.out_features, dtype=dtype, device=device) if linear.bias is not None else None
    module.bias = nn.Parameter(bias, requires_grad=False) if bias is not None else None


def _parameter(weight: torch.Tensor, kind: type[Any]) -> Any:
    """Return a frozen parameter whose class name libraries recognise as one of bitsandbytes."""
    parameter = nn.Parameter(weight, requires_grad=False)
    key = kind.__name__, type(parameter)
    parameter.__class__ = _namesakes.setdefault(key, type(kind.__name__, (type(parameter),), {}))
    return parameter


def _scales(count: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return scales or codebooks, tagged as part of a parameter."""
    tensor = torch.empty(count, dtype=dtype, device=device)
    tensor._is_param = True
    return tensor


def _state(linear: nn.Linear, config: Any, dtype: torch.dtype, device: torch.device) -> QuantState:
    blocks = -(-linear.in_features * linear.out_features // _BLOCK)
    nested = config.bnb_4bit_use_double_quant

    def floats(*count: int) -> torch.Tensor:
        return _scales(count, torch.float32, device)

    outer = None
    if nested:
        outer = QuantState(
            floats(-(-blocks // _NESTED_BLOCK)), code=floats(_CODE_8BIT), blocksize=_NESTED_BLOCK, dtype=torch.float32
        )
    return QuantState(
        absmax=_scales((blocks,), torch.uint8, device) if nested else floats(blocks),
        shape=torch.Size((linear.out_features, linear.in_features)),
        code=floats(_CODE_4BIT),
        blocksize=_BLOCK,
        quant_type=config.bnb_4bit_quant_type,
        dtype=dtype,
        offset=floats() if nested else None,
        state2=outer,
    )
