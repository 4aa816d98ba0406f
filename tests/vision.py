"""Small vision-language models with transformers' own processors, built on demand; an image needs few tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.small import small_tokenizer

VOCABULARY = 640
"""Of the models: the words of :func:`tests.small.small_tokenizer`, and the tokens that processors add."""
WITH_TORCHVISION = find_spec("torchvision") is not None
"""Whether Qwen's processors open and resize images with torchvision, as when they are loaded where it is installed."""
_CHAT_TEMPLATE = (
    "{%- for message in messages -%}<|{{ message.role }}|>"
    "{%- if message.content is string -%}{{ message.content }}"
    "{%- else -%}{%- for part in message.content -%}"
    "{%- if part.type == 'image' -%}IMAGE{%- else -%}{{ part.text }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}<|end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)
_TEXT: Mapping[str, Any] = {
    "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16,
    "max_position_embeddings": 2048, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip
_TOWER: Mapping[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2,
}  # fmt: skip
_ROTATED = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}


@dataclass(frozen=True)
class Family:
    """A family of vision-language models.

    Attributes:
        placeholder: what a prompt has in the place of an image.
        words: by the names that a tokenizer of the family has for them, the tokens that it has in addition.
        text, tower: fields of the configurations of the language model and of the vision tower.
        whole: further fields of the configuration, given the token of an image.
        processor: makes the processor of a tokenizer.
    """

    placeholder: str
    words: Mapping[str, str]
    text: Mapping[str, Any]
    tower: Mapping[str, Any]
    whole: Callable[[Callable[[str], int]], Mapping[str, Any]]
    processor: Callable[[Any], Any]
    further: Sequence[str] = field(default=())


def _gemma3(tokenizer: Any) -> Any:
    from transformers import Gemma3ImageProcessorPil, Gemma3Processor

    images = Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    return Gemma3Processor(images, tokenizer, image_seq_length=4)


def _gemma4(tokenizer: Any) -> Any:
    import transformers

    try:
        processor = transformers.Gemma4Processor
    except ImportError:
        pytest.skip("Gemma 4 needs torchvision with this release of transformers")
    images = transformers.Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70)
    # As Qwen's, it needs torchvision for videos alone.
    with mock.patch.object(transformers.ProcessorMixin, "check_argument_for_proper_class"):
        sounds = transformers.Gemma4AudioFeatureExtractor()
        return processor(sounds, images, tokenizer, video_processor=None, image_seq_length=70)


def _idefics3(tokenizer: Any) -> Any:
    from transformers import Idefics3ImageProcessorPil, Idefics3Processor

    try:
        images = Idefics3ImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    except ImportError:
        pytest.skip("Idefics 3 needs torchvision with this release of transformers")
    return Idefics3Processor(images, tokenizer, image_seq_len=4)


def _llava_next(tokenizer: Any) -> Any:
    from transformers import LlavaNextImageProcessorPil, LlavaNextProcessor

    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}, image_grid_pinpoints=_PINPOINTS
    )
    return LlavaNextProcessor(
        images, tokenizer, patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )


def _qwen(name: str, patch: int, videos: str = "Qwen2VLVideoProcessor") -> Callable[[Any], Any]:
    def made(tokenizer: Any) -> Any:
        import transformers

        fields = {"patch_size": patch, "size": {"shortest_edge": (2 * patch) ** 2, "longest_edge": (16 * patch) ** 2}}
        processor = getattr(transformers, name)
        if WITH_TORCHVISION:
            images = transformers.Qwen2VLImageProcessor(**fields)
            return processor(images, tokenizer, video_processor=getattr(transformers, videos)(patch_size=patch))
        # Its processor of videos can only be made with torchvision, and no row here has videos.
        with mock.patch.object(transformers.ProcessorMixin, "check_argument_for_proper_class"):
            return processor(transformers.Qwen2VLImageProcessorPil(**fields), tokenizer, video_processor=None)

    return made


_PINPOINTS = [[32, 64], [64, 32], [64, 64]]
FAMILIES: Mapping[str, Family] = {
    "gemma3": Family(
        "<start_of_image>",
        {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
        {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]},
        {**_TOWER, "image_size": 32, "patch_size": 8, "vision_use_head": False},
        lambda token: {
            "mm_tokens_per_image": 4,
            "boi_token_index": token("<start_of_image>"),
            "eoi_token_index": token("<end_of_image>"),
            "image_token_index": token("<image_soft_token>"),
        },
        _gemma3,
    ),
    "gemma4": Family(
        "<|image|>",
        {
            "image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>",
            "audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>",
        },
        {
            "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"],
            "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8,
        },
        {**_TOWER, "patch_size": 4, "num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 256},
        lambda token: {
            "image_token_id": token("<|image|>"), "boi_token_id": token("<|image>"), "eoi_token_id": token("<image|>"),
            "audio_token_id": token("<|audio|>"), "boa_token_id": token("<|audio>"),
            "eoa_token_index": token("<audio|>"), "video_token_id": token("<|video|>"), "audio_config": None,
        },
        _gemma4,
        ["<|video|>"],
    ),
    "idefics3": Family(
        "<image>",
        {"image_token": "<image>"},
        {},
        {**_TOWER, "image_size": 32, "patch_size": 8},
        lambda token: {"image_token_id": token("<image>"), "scale_factor": 2},
        _idefics3,
        ["<fake_token_around_image>", "<global-img>", *(f"<row_{row}_col_{col}>" for row in (1, 2) for col in (1, 2))],
    ),
    "llava_next": Family(
        "<image>",
        {"image_token": "<image>"},
        {},
        {**_TOWER, "model_type": "clip_vision_model", "image_size": 32, "patch_size": 8, "projection_dim": 32},
        lambda token: {
            "image_token_index": token("<image>"),
            "image_grid_pinpoints": _PINPOINTS,
            "image_seq_length": 16,
        },
        _llava_next,
    ),
    "qwen2_5_vl": Family(
        "<|vision_start|><|image_pad|><|vision_end|>",
        {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
        {**_ROTATED, "layer_types": ["full_attention"] * 2},
        {
            "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 8,
            "window_size": 32, "fullatt_block_indexes": [1], "out_hidden_size": 64,
        },
        lambda token: {
            "image_token_id": token("<|image_pad|>"),
            "video_token_id": token("<|video_pad|>"),
            "vision_start_token_id": token("<|vision_start|>"),
            "vision_end_token_id": token("<|vision_end|>"),
        },
        _qwen("Qwen2_5_VLProcessor", 8),
        ["<|vision_start|>", "<|vision_end|>"],
    ),
    "qwen3_vl": Family(
        "<|vision_start|><|image_pad|><|vision_end|>",
        {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
        _ROTATED,
        {
            "depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 8,
            "out_hidden_size": 64, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1],
        },
        lambda token: {
            "image_token_id": token("<|image_pad|>"),
            "video_token_id": token("<|video_pad|>"),
            "vision_start_token_id": token("<|vision_start|>"),
            "vision_end_token_id": token("<|vision_end|>"),
        },
        _qwen("Qwen3VLProcessor", 8, "Qwen3VLVideoProcessor"),
        ["<|vision_start|>", "<|vision_end|>"],
    ),
}  # fmt: skip


def small_processor(model_type: str) -> Any:
    """Return the processor of a family, which needs Pillow alone; without torchvision, Qwen's have no videos."""
    family = FAMILIES[model_type]
    tokenizer = small_tokenizer(chat_template=False, extra_special_tokens=dict(family.words))
    tokenizer.add_tokens(list(family.further), special_tokens=True)
    processor = family.processor(tokenizer)
    processor.chat_template = _CHAT_TEMPLATE.replace("IMAGE", family.placeholder)
    return processor


def small_vision_config(
    model_type: str, *, layers: int = 2, language: Mapping[str, Any] | None = None, **changes: Any
) -> Any:
    """Return the configuration of a small vision-language model, whose language model has so many layers.

    Args:
        language: changes of the language model's own configuration.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText

    family = FAMILIES[model_type]
    tokenizer = small_processor(model_type).tokenizer
    text = {**_TEXT, "vocab_size": VOCABULARY, **family.text, **(language or {}), "num_hidden_layers": layers}
    if "layer_types" in text:
        kinds = text["layer_types"]
        text["layer_types"] = [kinds[layer % len(kinds)] for layer in range(layers)]
    config = AutoConfig.for_model(
        model_type,
        text_config=text,
        vision_config=dict(family.tower),
        **{**family.whole(tokenizer.convert_tokens_to_ids), **changes},
    )
    config.architectures = [AutoModelForImageTextToText._model_mapping[type(config)].__name__]
    return config


def picture(width: int, height: int) -> Any:
    """Return an image of these pixels, of one colour."""
    from PIL import Image

    return Image.new("RGB", (width, height), (width % 256, height % 256, 128))


def write_small_vision_model(directory: Path, model_type: str, *, weights: bool = True, **changes: Any) -> Path:
    """Write a small vision-language model with its processor and return its directory."""
    import torch
    from transformers import AutoModelForImageTextToText

    config = small_vision_config(model_type, **changes)
    config.save_pretrained(directory)
    if weights:
        torch.manual_seed(0)
        AutoModelForImageTextToText.from_config(config).save_pretrained(directory)
    small_processor(model_type).save_pretrained(directory)
    return directory
