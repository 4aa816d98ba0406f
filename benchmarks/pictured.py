"""Shapes of published vision-language models, with transformers' own processors, and rows with images for them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.shapes import CONFIGURATIONS, LETTER, write_model, write_tokenizer

_TOKENS = {name: 4 + place for place, name in enumerate(("<image>", "<begin>", "<end-of-image>", "<video>"))}
"""The placeholder of an image in a prompt, after the tokens of every tokenizer here."""
_CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.content is string -%}{{ message.content }}"
    "{%- else -%}{%- for part in message.content -%}"
    "{%- if part.type == 'image' -%}IMAGE{%- else -%}{{ part.text }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}<end>{%- endfor -%}"
)

PICTURED: Mapping[str, Mapping[str, Any]] = {
    "qwen2.5-vl-3b": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "image_token_id": _TOKENS["<image>"],
        "vision_start_token_id": _TOKENS["<begin>"],
        "vision_end_token_id": _TOKENS["<end-of-image>"],
        "video_token_id": _TOKENS["<video>"],
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "qwen2_5_vl_text", "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
            "num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 151936, "rms_norm_eps": 1e-6,
            "max_position_embeddings": 128000, "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [16, 24, 24]},
        },
        "vision_config": {
            "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 2048,
            "patch_size": 14, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
        },
    },
    "gemma-3-4b": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "image_token_index": _TOKENS["<image>"],
        "boi_token_index": _TOKENS["<begin>"],
        "eoi_token_index": _TOKENS["<end-of-image>"],
        "mm_tokens_per_image": 256,
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208,
            "sliding_window": 1024, "max_position_embeddings": 131072,
        },
        "vision_config": {
            "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304,
            "num_hidden_layers": 27, "num_attention_heads": 16, "image_size": 896, "patch_size": 14,
            "vision_use_head": False,
        },
    },
}  # fmt: skip
"""By name, what the models' own config.json files on the Hub say (https://huggingface.co): their sizes."""

SHAPES: Mapping[str, Mapping[str, Any]] = {**CONFIGURATIONS, **PICTURED}
"""By name, the shapes of text and of vision-language models."""


def write_shape(directory: Path, configuration: Mapping[str, Any]) -> Path:
    """Write a configuration with a small tokenizer, or with a processor if the model sees; return the directory."""
    if "vision_config" not in configuration:
        return write_model(directory, configuration)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(configuration, indent=1), encoding="utf-8")
    make, placeholder, names = _PROCESSORS[configuration["model_type"]]
    tokenizer = write_tokenizer(directory, _TOKENS, dict(names))
    processor = make(tokenizer)
    processor.chat_template = _CHAT_TEMPLATE.replace("IMAGE", placeholder)
    processor.save_pretrained(directory)
    return directory


def _qwen(tokenizer: Any) -> Any:
    # Both processors need torchvision.
    from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    return Qwen2_5_VLProcessor(Qwen2VLImageProcessor(), tokenizer, video_processor=Qwen2VLVideoProcessor())


def _gemma(tokenizer: Any) -> Any:
    from transformers import Gemma3ImageProcessorPil, Gemma3Processor

    images = Gemma3ImageProcessorPil(size={"height": 896, "width": 896})
    return Gemma3Processor(images, tokenizer, image_seq_length=256)


_PROCESSORS: Mapping[str, tuple[Callable[[Any], Any], str, Mapping[str, str]]] = {
    "qwen2_5_vl": (_qwen, "<begin><image><end-of-image>", {"image_token": "<image>", "video_token": "<video>"}),
    "gemma3": (
        _gemma, "<begin>", {"boi_token": "<begin>", "eoi_token": "<end-of-image>", "image_token": "<image>"},
    ),
}  # fmt: skip
"""By the type of a model: what makes its processor, what stands in a prompt for an image, and the tokenizer's names."""


def write_pictured_rows(file: Path, lengths: Iterable[int], pixels: tuple[int, int], *, pairs: bool = False) -> Path:
    """Write rows of an image and so many tokens of text, half of them an answer, and return the file.

    Args:
        pixels: width and height of each image.
        pairs: whether each has a rejected answer, too.
    """
    from datasets import Dataset, Image, List
    from PIL import Image as Pillow

    picture = Pillow.new("RGB", pixels, (40, 80, 120))
    rows = []
    for length in lengths:
        asked, answered = (
            [{"role": role, "content": LETTER * (length // 2)}] for role in ("user", "assistant")
        )  # fmt: skip
        row = {"prompt": asked, "chosen": answered, "rejected": answered} if pairs else {"messages": asked + answered}
        rows.append({**row, "images": [picture]})
    Dataset.from_list(rows).cast_column("images", List(Image())).to_parquet(str(file))
    return file
