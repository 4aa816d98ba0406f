"""Loads a model's configuration, class and processor, and builds the model with its own, random or fake weights."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoConfig, AutoProcessor, PreTrainedTokenizerFast
from transformers.initialization import no_init_weights
from transformers.modeling_utils import get_state_dict_dtype, get_total_byte_count, load_state_dict
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.utils import logging
from transformers.utils.peft_utils import find_adapter_config_file
from trl.trainer.utils import create_model_from_path

from autotune.core.machine import DeviceKind
from autotune.core.workload import CUSTOM_CODE, ModelSource
from autotune.errors import InputError, UnreadError, first_line, one_line
from autotune.inspection.model import adapter_alone
from autotune.step.distributed.group import world_size
from autotune.step.hub import loading_error
from autotune.step.models.heads import Head
from autotune.units import GIB
from autotune.virtual import is_tracing, on_real_tensors, unused_bytes

# Standard deviation of random weights before quantisation: transformers' usual initializer_range.
WEIGHT_DEVIATION = 0.02
# A block that exceeds the unused memory by more than this is allocated anew (``caching_allocator_warmup`` of
# transformers).
_MIN_NEW_BLOCK_BYTES = 3 * GIB // 2
# Values of ``device_map`` (the first is TRL's default) with which transformers distributes layers over devices by their
# free memory (``_get_device_map`` of ``transformers/integrations/accelerate.py``).
_DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
_IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")
_WEIGHTS = "model*.safetensors"
_OFFLINE_HINT = "Check the name; where there is no network, give a local directory."


def load_config(source: ModelSource, head: Head) -> Any:
    """Return the model's configuration; its first architecture is the class that a trainer with that head trains.

    Raises:
        InputError: it is missing, cannot be read, or names no architecture that can be trained here.
        UnreadError: its weights are quantised in the checkpoint, or the hub cannot be reached.
    """
    try:
        config = AutoConfig.from_pretrained(source.name, revision=source.revision, trust_remote_code=False)
        if config.dtype is None:
            config.dtype = _dtype_of_weights(Path(source.name))
    except (OSError, ValueError, KeyError) as error:
        if CUSTOM_CODE in str(error):
            raise InputError(
                f"{source.name} {CUSTOM_CODE}: TRL runs it only with trust_remote_code, autotune never.",
                hint="`autotune dry-run --gpu NAME -- COMMAND` runs a training with it for a few steps, without a GPU.",
            ) from error
        with suppress(OSError):  # there is no such repository
            if adapter := find_adapter_config_file(source.name, revision=source.revision):
                raise adapter_alone(source.name, Path(adapter), loads=head.auto_class is not None) from error
        message = f"The configuration of {source.name} cannot be loaded: {first_line(error)}"
        raise loading_error(error, message, "" if Path(source.name).is_dir() else _OFFLINE_HINT) from error
    except (StrictDataclassError, ArithmeticError, AttributeError, RecursionError, TypeError) as error:
        message = f"The configuration of {source.name} is not valid: {one_line(error)}."
        raise InputError(message, hint="Correct its config.json.") from error
    _check_not_quantized(config, source)
    return head.configured(config, source.name)


def _dtype_of_weights(folder: Path) -> torch.dtype | None:
    """Return the dtype of the weights, which ``dtype: auto`` selects without one in the configuration (`_get_dtype`).

    None for a model without weights in a local directory.

    Raises:
        InputError: the weights cannot be read.
    """
    check_weights(folder)
    files = sorted(folder.glob(_WEIGHTS))
    return get_state_dict_dtype(load_state_dict(files[0], map_location="meta")) if files else None


def check_weights(folder: Path) -> None:
    """Check by size and header that the weight files in a local directory are complete.

    Raises:
        InputError: a file is not.
    """
    for file in sorted(folder.glob(_WEIGHTS)):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            message = f"The weights in {file} cannot be read: {first_line(error)}."
            raise InputError(message, hint="Save or download them again.") from error


def _check_not_quantized(config: Any, source: ModelSource) -> None:
    """Check that the checkpoint's weights are not quantised: traces and random weights do not support that.

    Raises:
        UnreadError: they are.
    """
    # The language model of a model with images may have its own (`get_hf_quantizer` of transformers).
    parts = (config, config.get_text_config(decoder=True))
    quantization = next(filter(None, (getattr(part, "quantization_config", None) for part in parts)), None)
    if quantization:
        method = quantization.get("quant_method", "a method without a name")
        raise UnreadError(
            f"The weights of {source.name} are quantised in its checkpoint ({method}), which is not supported.",
            hint="Name the model that they were made of; load_in_4bit or load_in_8bit quantises it when it is loaded.",
        )


def model_class(config: Any) -> type[Any]:
    """Return the class of a loaded configuration; this imports its module."""
    architecture: type[Any] = getattr(transformers, config.architectures[0])
    return architecture


def load_processor(source: ModelSource, auto_class: type[Any] = AutoProcessor) -> Any:
    """Return the tokenizer or processor, loaded as by TRL; an empty tokenizer for a source without one.

    Args:
        auto_class: transformers' auto class with which TRL loads it.

    Raises:
        InputError: there is none, it cannot be read, or a package that it needs is not installed.
        UnreadError: the hub cannot be reached.
    """
    if not source.tokenizer:
        return empty_tokenizer()
    try:
        return auto_class.from_pretrained(source.name, revision=source.revision, trust_remote_code=False)
    except ImportError as error:
        lacking, *_ = first_line(error).split(". ")
        raise InputError(
            f"The tokenizer or processor of {source.name} lacks a package: {lacking}.",
            hint="Install it, as with `pip install 'trl[vlm]'` for processors of images; torchvision in the build for"
            " your torch.",
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = f"{source.name} has no tokenizer or processor that can be loaded: {first_line(error)}"
        raise loading_error(error, message, "Save it next to the model's config.json.") from error


def tokenizer_of(processor: Any) -> Any:
    """Return the tokenizer of a processor, which for a text-only model is the processor itself."""
    return getattr(processor, "tokenizer", processor)


def meta_model(architecture: type[Any], config: Any) -> Any:
    """Return a model on the meta device."""
    with torch.device("meta"):
        return architecture(config)


def loaded_model(
    source: ModelSource, init_kwargs: Mapping[str, Any], quantization_config: Any | None, device: DeviceKind, head: Head
) -> Any:
    """Return a model on ``device``, with its own weights or random ones, loaded by TRL's code.

    For random weights, transformers gets an empty checkpoint, and initialises all weights in place. Weights that are
    quantised on loading have to exist in the checkpoint: each is drawn when the loader reads it, so the whole
    unquantised model is never in memory.
    """
    config = load_config(source, head)
    architecture = model_class(config)
    kwargs = _load_kwargs(init_kwargs, quantization_config, device)
    if source.init == "pretrained":
        return create_model_from_path(source.name, architecture=architecture, revision=source.revision, **kwargs)
    weights: dict[str, _RandomTensor] = {}
    if quantization_config is not None:
        weights = _random_checkpoint(meta_model(architecture, config), device)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # silences a warning that lists every weight as missing
    try:
        model = create_model_from_path(None, architecture=architecture, config=config, state_dict=weights, **kwargs)
    finally:
        logging.set_verbosity(verbosity)
    model.config._name_or_path = source.name
    return model


def _load_kwargs(init_kwargs: Mapping[str, Any], quantization_config: Any | None, device: DeviceKind) -> dict[str, Any]:
    kwargs = {name: value for name, value in init_kwargs.items() if name not in ("revision", "trust_remote_code")}
    if quantization_config is not None:
        kwargs["quantization_config"] = quantization_config
    if device == "cuda":
        # Equals TRL's own choice if the model fits, and raises out of memory if it does not. With several processes,
        # TRL leaves the weights on the host, from where the engine takes them (``__init__`` of its trainers).
        alone = world_size() == 1 and kwargs.get("device_map", _DEVICE_MAPS[0]) is not None
        kwargs["device_map"] = {"": torch.cuda.current_device()} if alone else None
    return kwargs


def virtual_model(
    config: Any, init_kwargs: Mapping[str, Any], quantization_config: Any | None, device: torch.device
) -> Any:
    """Return a model on ``device``, whose weights are initialised only if nothing is traced."""
    architecture = model_class(config)
    # As `from_pretrained` of transformers 5.
    name = init_kwargs["dtype"] or init_kwargs.get("torch_dtype") or "auto"
    dtype = getattr(torch, name) if name != "auto" else config.dtype or torch.float32
    # As transformers loads a model to a GPU: weights are tied before any is on the device. On a CPU, buffers keep the
    # values that constructors compute.
    build_device = device if device.type == "cpu" and quantization_config is None else torch.device("meta")
    implementations = {name: init_kwargs[name] for name in _IMPLEMENTATIONS if name in init_kwargs}
    with build_device, no_init_weights() if is_tracing() else nullcontext():
        model = architecture._from_config(config, dtype=dtype, **implementations)
        # Skipping the initialisation of weights also skips tying them.
        model.tie_weights()
    device_map = init_kwargs.get("device_map", _DEVICE_MAPS[0])
    # bitsandbytes sets a device map if there is none (`update_device_map` of its quantizers).
    by_device = device_map is not None or quantization_config is not None
    warms_up = device.type != "cpu" and world_size() == 1 and by_device
    if warms_up and device_map in _DEVICE_MAPS:
        # accelerate's `get_max_memory` allocates this before it reads a device's free memory. The caching allocator
        # keeps the segment, which makes the block for all weights smaller.
        torch.empty(1, dtype=torch.int64, device=device)
    quantizer = None
    if quantization_config is not None:
        quantizer = AutoHfQuantizer.from_config(quantization_config, pre_quantized=False)
        # As `from_pretrained`: the error names the package that is missing.
        quantizer.validate_environment()
        # bitsandbytes creates its parameters from real tensors.
        with on_real_tensors():
            quantizer.preprocess_model(model, dtype=dtype, device_map=None)
    if warms_up:
        _warm_up_allocator(model, device, quantizer)
    if quantizer is not None:
        from autotune.virtual.patches.quantized import fill_quantized

        fill_quantized(model, dtype, device)
        quantizer.postprocess_model(model)
        model.hf_quantizer = quantizer
    # A shared parameter is moved at its first occurrence, and is no meta tensor at later ones.
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    return model


def _warm_up_allocator(model: Any, device: torch.device, quantizer: Any | None = None) -> None:
    """Allocate and free one block for all weights, as transformers does before it loads them to a GPU.

    The caching allocator keeps the segment, and splits it for weights, gradients and activations
    (``caching_allocator_warmup`` of ``transformers/modeling_utils.py``). For a further model, such as a reference, the
    block is smaller by the reserved but unallocated bytes. transformers skips this if weights are loaded to the host,
    as with ``device_map: null``, which TRL sets with several processes.
    """
    total = get_total_byte_count(model, dict.fromkeys(model.state_dict(keep_vars=True), device), quantizer)[device]
    unused = unused_bytes()
    if total - unused > unused:
        total -= unused
    else:
        total = unused + 1 if total - unused > _MIN_NEW_BLOCK_BYTES else 0
    torch.empty(int(total // 2), dtype=torch.float16, device=device)


class _RandomTensor:
    """A checkpoint tensor that is drawn when it is read, with the interface of a slice of a safetensors file."""

    def __init__(self, shape: torch.Size, device: DeviceKind) -> None:
        self._shape = shape
        self._device = device

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: object) -> torch.Tensor:
        return torch.empty(self._shape, device=self._device).normal_(std=WEIGHT_DEVIATION)


def _random_checkpoint(model: Any, device: DeviceKind) -> dict[str, _RandomTensor]:
    tied = set(model.all_tied_weights_keys)
    names = {
        f"{module_name}.{name}": _RandomTensor(parameter.shape, device)
        for module_name, module in model.named_modules()
        if isinstance(module, (torch.nn.Linear, Conv1D))
        for name, parameter in module.named_parameters(recurse=False)
    }
    return {name: tensor for name, tensor in names.items() if name not in tied}


_UNKNOWN, _END, _PADDING = "<unk>", "<end>", "<pad>"


def empty_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer without words, with the special tokens that trainers need."""
    words = Tokenizer(WordLevel({_UNKNOWN: 0, _END: 1, _PADDING: 2}, unk_token=_UNKNOWN))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token=_UNKNOWN, eos_token=_END, pad_token=_PADDING, bos_token=_END
    )


_processors: dict[tuple[ModelSource, type[Any]], tuple[Any, int]] = {}
"""Loaded processors, each with the number of its tokens after loading."""


def processor_for(source: ModelSource, auto_class: type[Any]) -> Any:
    """Return a mutable copy of the cached result of :func:`load_processor`.

    Raises:
        InputError: there is none, or it cannot be read.
    """
    processor, count = _processors.get((source, auto_class), (None, 0))
    # A trainer may have added tokens to the shared backend.
    if processor is None or len(tokenizer_of(processor)) != count:
        processor = load_processor(source, auto_class)
        _processors[source, auto_class] = processor, len(tokenizer_of(processor))
    # Share the backend: copying it takes as long as loading it.
    backend = getattr(tokenizer_of(processor), "_tokenizer", None)
    return deepcopy(processor, {id(backend): backend})


def cached_vocabularies() -> AbstractContextManager[object]:
    """Patch tokenizers to cache their vocabulary, in which trainers look up special tokens."""
    return mock.patch.object(
        PreTrainedTokenizerFast, "get_vocab", lambda tokenizer: _vocabulary(tokenizer._tokenizer, len(tokenizer))
    )


@lru_cache(4)
def _vocabulary(backend: Any, _size: int) -> dict[str, int]:
    """Return the vocabulary of a Rust tokenizer; the size is part of the cache key, since tokens may be added."""
    words: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    return words
