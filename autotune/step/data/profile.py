"""Builds the profiles of a model's configuration and of a tokenised dataset."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import ModuleList
from transformers.pytorch_utils import Conv1D

from autotune.core.jobs.protocol import PrepareRequest
from autotune.core.rows.documents import Documents
from autotune.core.rows.lengths import LengthDistribution
from autotune.core.workload import DatasetProfile, KeyValueCache, ModelProfile, ModelSource
from autotune.step.data.dataset import LoadedRows
from autotune.step.data.remarks import remarks
from autotune.step.images.tokens import IMAGE_COLUMNS, image_profile
from autotune.step.models.loading import meta_model, model_class
from autotune.step.models.shrink import first_layers
from autotune.step.rows import Counts, distribution
from autotune.step.trainers import find_adapter
from autotune.techniques.lora import LANGUAGE_MODEL
from autotune.techniques.max_length import KEEP_END, TRUNCATION
from autotune.trainers import find_trainer
from autotune.trainers.base import Trainer

_WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
_SUPPORTED = {"flex_attention": "_supports_flex_attn", "flash": "_supports_flash_attn"}
"""Attributes of a model's class without which ``from_pretrained`` refuses attention implementations."""
_POSITIONS = re.compile(r"(wpe|position[^.]*|pos_encoding)$")
"""The end of the name of a table of positions in transformers' modeling files."""
_FINGERPRINT_DIGITS = 16
_TOKENIZER_CONFIG = "tokenizer_config.json"
# Keys of that file with the location from which transformers loaded the tokenizer (``from_pretrained``).
_PLACES = frozenset({"is_local", "local_files_only", "name_or_path"})


def model_profile(source: ModelSource, config: Any, processor: Any, folder: Path) -> ModelProfile:
    """Return the profile of a model, built on the meta device; ``folder`` is for temporary files."""
    text = config.get_text_config()
    architecture = model_class(config)
    model = meta_model(architecture, config)
    embedded = embedded_positions(model, positions(text))
    directory = Path(source.name)
    return ModelProfile(
        name=source.name,
        model_type=config.model_type,
        architecture=architecture.__name__,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        layers=text.num_hidden_layers,
        vocabulary=model.get_input_embeddings().weight.shape[0],
        max_positions=embedded or positions(text),
        linear_modules=linear_modules(model),
        has_weights=any(any(directory.glob(name)) for name in _WEIGHT_FILES) if directory.is_dir() else None,
        fingerprint=_model_fingerprint(config, processor, folder),
        layer_kinds=layer_kinds(config, model),
        fused_experts=any("experts" in name and tensor.dim() == 3 for name, tensor in model.named_parameters()),
        cache=key_value_cache(text),
        attention_heads=attention_heads(text),
        grouped_heads=grouped_heads(text),
        # TRL's trainers add this loss only if the configuration has `output_router_logits`.
        router_aux_loss_coef=getattr(text, "router_aux_loss_coef", 0.0) if hasattr(text, "output_router_logits") else 0,
        quantizable=sum(module.weight.numel() for module in _linear_in_layers(model).values()),
        dtype=str(config.dtype or "").removeprefix("torch."),
        accepts_loss_kwargs=_accepts_loss_kwargs(model),
        largest_weight=max(parameter.numel() for parameter in model.parameters()),
        bidirectional_images=bidirectional_images(architecture, text),
        language_modules=linear_modules(model, LANGUAGE_MODEL),
        embeds_positions=embedded is not None,
        lacks_attention=tuple(kind for kind, flag in _SUPPORTED.items() if not getattr(architecture, flag)),
    )


def positions(text: Any) -> int | None:
    """Return the model's maximum length, extended by YaRN, as vLLM computes it (``_get_and_verify_max_len``)."""
    maximum: int | None = getattr(text, "max_position_embeddings", getattr(text, "max_seq_len", None))
    rope = getattr(text, "rope_parameters", None) or {}
    if maximum is None or rope.get("rope_type") != "yarn":
        return maximum
    return max(maximum, int(rope["factor"] * (rope.get("original_max_position_embeddings") or maximum)))


def embedded_positions(model: Any, maximum: int | None) -> int | None:
    """Return the number of positions in a table of a model, learned or fixed; None if it computes any position.

    Args:
        maximum: the model's maximum length; vision towers have tables of other numbers of positions.
    """
    padding = {name: each.padding_idx for name, each in model.named_modules() if isinstance(each, torch.nn.Embedding)}
    for name, table in (*model.named_parameters(), *model.named_buffers()):
        owner = name.removesuffix(".weight")
        # OPT adds two rows, and RoBERTa counts positions from the one after that of padding.
        if maximum is None or not _POSITIONS.search(owner) or table.dim() != 2:
            continue
        if not maximum <= len(table) <= maximum + 2:
            continue
        index = padding.get(owner)
        return min(maximum, len(table) - (0 if index is None else index + 1))
    return None


def bidirectional_images(architecture: type[Any], text: Any) -> bool:
    """Return whether the tokens of an image attend to each other in both directions.

    Modelling code passes such blocks to transformers' masks as ``block_sequence_ids``. Gemma 4 does so only if its
    configuration enables it.
    """
    source = inspect.getsource(sys.modules[architecture.__module__])
    optional = 'use_bidirectional_attention == "vision"' in source
    return "block_sequence_ids" in source and (not optional or text.use_bidirectional_attention == "vision")


def _accepts_loss_kwargs(model: Any) -> bool:
    """Return ``model_accepts_loss_kwargs`` as transformers' ``Trainer.__init__`` computes it."""
    parameters = inspect.signature(model.forward).parameters.values()
    return bool(getattr(model, "accepts_loss_kwargs", any(each.kind is each.VAR_KEYWORD for each in parameters)))


def linear_modules(model: Any, pattern: str = ".*") -> tuple[str, ...]:
    """Return the last name components of the linear modules inside the layers, in the order of the first layer.

    Args:
        pattern: a regular expression for full module names.
    """
    names = (name for name in _linear_in_layers(model) if re.fullmatch(pattern, name))
    return tuple(dict.fromkeys(name.rpartition(".")[2] for name in names))


def _linear_in_layers(model: Any) -> Mapping[str, Any]:
    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (torch.nn.Linear, Conv1D))
        and any(part.isdigit() for part in name.split("."))
        and module is not head
    }


def dataset_profile(request: PrepareRequest, loaded: LoadedRows, rows: Any) -> DatasetProfile:
    """Return the profile of tokenised rows."""
    trainer, adapter = find_trainer(request.trainer), find_adapter(request.trainer)
    lengths, trainable = adapter.lengths(rows), adapter.trainable(rows)
    counted = None if (trainable == lengths.sum(axis=1)).all() else trainable
    keeps_end = request.dataset.reading.get(TRUNCATION) == KEEP_END
    min_kept_length = adapter.min_kept_length(rows, keeps_end=keeps_end)
    documents = documents_of(trainer, lengths, min_kept_length, counted, keeps_end=keeps_end)
    completions = adapter.completions(rows)
    pairs = trainer.exchanged(documents)
    if request.dataset.test_size is not None:
        # TRL draws the rows that it trains on.
        documents = replace(documents, order=None)
    single = documents.sequences == 1 and all((part[:, 1] <= 1).all() for part in documents.groups.parts())
    return DatasetProfile(
        name=request.dataset.name,
        format=loaded.format.name,
        columns=tuple(loaded.rows.column_names),
        lengths=LengthDistribution(documents.widths),
        trainable_tokens=int(trainable.sum()),
        tokenized_directory=request.tokenized_directory,
        fingerprint=_rows_fingerprint(
            rows, [*adapter.columns, *(name for name in IMAGE_COLUMNS if name in rows.column_names)]
        ),
        completions=None if completions is None else distribution(completions),
        images=image_profile(rows, trainer, lengths, trainable),
        several=None if single and documents.order is None and counted is None else documents,
        exchanged=None if pairs is None else Documents.of_lengths(distribution(pairs)),
        remarks=tuple(
            remarks(trainer, loaded.rows, loaded.format, request.dataset.name, lengths[:, 0], documents.unkept)
        ),
        documents_of_row=loaded.format.documents,
    )


def documents_of(
    trainer: Trainer,
    lengths: Counts,
    min_kept_length: Counts,
    trained: Counts | None = None,
    *,
    keeps_end: bool = False,
) -> Documents:
    """Return the documents of rows from an adapter's counts of their tokens.

    Args:
        lengths: tokens of each row in each of the trainer's parts; shape (rows, parts).
        min_kept_length: the smallest maximum length at which each row is kept, beyond its lengths' own minimum; shape
            (rows,).
        trained: tokens of each row that the loss counts; shape (rows,). None: all, or unknown.
        keeps_end: whether rows are cut at their beginning, so that they keep their answers: a length drops no row for
            the lengths of its parts.
    """
    needs, *sequences = trainer.document(tuple(lengths.T))
    columns = [min_kept_length if keeps_end else np.maximum(needs, min_kept_length), *sequences]
    stacked = np.stack(columns, axis=1, dtype=np.int32, casting="unsafe")
    return Documents.of_rows(stacked, ordered=trainer.ordered, trained=trained, keeps_end=keeps_end)


def _model_fingerprint(config: Any, processor: Any, folder: Path) -> str:
    digest = hashlib.sha256()
    # Independent of the model's name and location, and of the version of transformers that wrote the configuration.
    fields = {name: value for name, value in config.to_dict().items() if name != "transformers_version"}
    fields.pop("_name_or_path", None)
    digest.update(json.dumps(fields, sort_keys=True, default=str).encode())
    with tempfile.TemporaryDirectory(dir=folder) as directory:
        processor.save_pretrained(directory)
        for file in sorted(Path(directory).rglob("*")):
            if file.is_file():
                digest.update(file.name.encode() + _without_location(file))
    return digest.hexdigest()[:_FINGERPRINT_DIGITS]


def _without_location(file: Path) -> bytes:
    """Return the content of a tokenizer's file without its location, including whether HF_HUB_OFFLINE was set."""
    if file.name != _TOKENIZER_CONFIG:
        return file.read_bytes()
    settings = json.loads(file.read_text(encoding="utf-8"))
    return json.dumps({name: value for name, value in settings.items() if name not in _PLACES}, sort_keys=True).encode()


def _rows_fingerprint(rows: Any, columns: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for batch in rows.select_columns(list(columns)).with_format("numpy").iter(batch_size=1000):
        for column in columns:
            for values in batch[column]:
                digest.update(np.size(values).to_bytes(8, "little") + values.tobytes())
    return digest.hexdigest()[:_FINGERPRINT_DIGITS]


# Words in ``layer_types`` of layers whose state has a fixed size.
_FIXED_STATE = ("linear_attention", "mamba", "conv", "recurrent")


def key_value_cache(text: Any) -> KeyValueCache | None:
    """Return the dimensions of a text model's key-value cache, or None if the configuration does not contain them.

    This is an upper bound: layers with a sliding window count as full attention, and if layers differ in their heads,
    the widest counts for all.
    """
    layers = _caching_layers(text)
    compressed = _largest(text, "kv_lora_rank")
    if compressed:
        # Multi-head latent attention (DeepSeek) caches one compressed vector and one rotated key for all heads.
        return KeyValueCache(layers, 1, compressed + (_largest(text, "qk_rope_head_dim") or 0))
    queries, hidden = _largest(text, "num_attention_heads"), getattr(text, "hidden_size", None)
    heads = _largest(text, "num_key_value_heads", "num_global_key_value_heads") or queries
    width = _largest(text, "head_dim", "global_head_dim") or (hidden // queries if hidden and queries else None)
    return KeyValueCache(layers, heads, 2 * width) if heads and width else None


def grouped_heads(text: Any) -> bool:
    """Return whether a text model uses grouped-query attention.

    Latent attention does not: it caches one compressed key for all heads, but computes one per head from it.
    """
    queries = _largest(text, "num_attention_heads")
    shared = _largest(text, "num_key_value_heads", "num_global_key_value_heads")
    return not _largest(text, "kv_lora_rank") and bool(queries and shared) and shared != queries


def attention_heads(text: Any) -> int | None:
    """Return the number of query heads of a layer, or None if layers differ or the configuration has no such field."""
    found = {getattr(layer, "num_attention_heads", None) for layer in _layers(text)}
    return found.pop() if len(found) == 1 else None


def _caching_layers(text: Any) -> int:
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    if not isinstance(kinds, (list, tuple)):
        return int(text.num_hidden_layers)
    return sum(not any(word in str(kind) for word in _FIXED_STATE) for kind in kinds)


def _largest(text: Any, *names: str) -> int | None:
    found = [value for layer in _layers(text) for name in names if isinstance(value := getattr(layer, name, None), int)]
    return max(found, default=None)


def _layers(text: Any) -> Sequence[Any]:
    """Return one configuration per layer if layers differ (Gemma 4): the model's own then raises on access."""
    return text.per_layer_config if getattr(text, "is_heterogeneous", False) else (text,)


# Properties with an entry per layer, which some classes compute from other fields.
_COMPUTED_LISTS = ("layer_types", "layers_block_type", "kv_sharing_modes")


def layer_kinds(config: Any, model: Any) -> tuple[str, ...]:
    """Return a name for the kind of each layer, in order; layers with equal names have the same structure.

    Such layers have the same modules, parameters and per-layer configuration, of which the latter distinguishes sliding
    windows. If a copy with fewer layers does not equal the model's first layers, each layer is its own kind, so that
    nothing is extrapolated from such a copy.

    Args:
        model: the whole model, on any device.
    """
    text = config.get_text_config()
    count = text.num_hidden_layers
    fewer_layers = -(-count // 2)
    shorter = meta_model(type(model), first_layers(config, fewer_layers))
    paths = _layer_lists(model, count).intersection(_layer_lists(shorter, fewer_layers))
    structures = _structures(model, paths, count)
    if not paths or structures[:fewer_layers] != _structures(shorter, paths, fewer_layers):
        return tuple(map(str, range(count)))
    numbers = {structure: number for number, structure in enumerate(dict.fromkeys(structures))}
    per_layer = [*_per_layer_lists(text, count), *_features_added(config, count)]
    return tuple(
        " ".join([*(str(values[layer]) for values in per_layer), str(numbers[structure])])
        for layer, structure in enumerate(structures)
    )


def _layer_lists(model: Any, count: int) -> set[str]:
    """Return the paths of the outermost module lists with ``count`` modules."""
    return {
        path
        for path, module in model.named_modules()
        if isinstance(module, ModuleList) and len(module) == count and not any(map(str.isdigit, path.split(".")))
    }


def _structures(model: Any, paths: Collection[str], count: int) -> list[tuple[tuple[object, ...], ...]]:
    """Return the module classes and the parameter shapes of each layer, with their names.

    A shared parameter belongs to the first layer that has it.
    """
    structures: list[list[tuple[object, ...]]] = [[] for _ in range(count)]
    named: list[tuple[str, object]] = [(name, type(module).__name__) for name, module in model.named_modules()]
    named += [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    for path in sorted(paths):
        for name, structure in named:
            if name.startswith(f"{path}."):
                layer, _, inside = name.removeprefix(f"{path}.").partition(".")
                structures[int(layer)].append((path, inside, structure))
    return [tuple(parts) for parts in structures]


def _per_layer_lists(text: Any, count: int) -> list[list[object]]:
    """Return the configuration's lists with an entry per layer, except one that has the indices of all layers."""
    named = vars(text) | {name: getattr(text, name, None) for name in _COMPUTED_LISTS}
    lists = [list(value) for _, value in sorted(named.items()) if isinstance(value, list | tuple)]
    return [values for values in lists if len(values) == count and values != list(range(count))]


def _features_added(config: Any, count: int) -> list[list[object]]:
    """Return for each layer whether a feature of the vision tower is added to its output; empty if there are none.

    Qwen3-VL and related models add features of the tower to the outputs of the language model's first layers
    (``deepstack_visual_embeds`` in ``modeling_qwen3_vl.py``), which the module structure does not show.
    """
    features = getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", None) or ()
    return [[layer < len(features) for layer in range(count)]] if features else []
