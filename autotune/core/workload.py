"""The workload: what is to be trained, on what data, by which trainer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from autotune.core.documents import Documents
from autotune.core.lengths import LengthDistribution

Init = Literal["random", "pretrained"]

IGNORED_LABEL = -100
"""Label of tokens that the loss leaves out: ``ignore_index`` of ``torch.nn.CrossEntropyLoss``, which TRL keeps to."""


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from.

    Attributes:
        name: hub id, or absolute path of a local directory, or of a directory that holds a lone ``config.json``.
        init: ``random`` builds weights from the configuration; ``pretrained`` loads them.
        revision: hub revision.
    """

    name: str
    init: Init = "random"
    revision: str = "main"


@dataclass(frozen=True)
class DatasetSource:
    """Where a dataset comes from, in the words of ``datasets.load_dataset``.

    Attributes:
        name: what the user wrote, for messages.
        path: builder name (``json``, ``csv``, ``parquet``) for files, else a hub id or a directory.
        data_files: absolute path of a single local file, or None.
        split: which split is trained on.
    """

    name: str
    path: str
    data_files: str | None = None
    split: str = "train"


@dataclass(frozen=True)
class ModelProfile:
    """What a model's configuration and tokenizer say; measured by building it without storage.

    Attributes:
        name: what the user wrote, or its absolute path.
        model_type: transformers' name of the architecture, such as ``qwen2``.
        architecture: class that is built, such as ``Qwen2ForCausalLM``.
        parameters: number of weights.
        layers: number of transformer layers.
        vocabulary: rows of the embedding.
        max_positions: longest position the model was made for, or None where it has none.
        experts: number of experts per layer, or None for a dense model.
        linear_modules: last names of the linear modules inside the layers, such as ``q_proj``.
        has_weights: whether loadable weights lie beside the configuration (None: on the hub, not looked up).
        fingerprint: hash of the configuration and the tokenizer.
        layer_kinds: a word for each layer; layers with equal words are built alike.
        fused_experts: whether one parameter holds the weights of all experts of a layer.
    """

    name: str
    model_type: str
    architecture: str
    parameters: int
    layers: int
    vocabulary: int
    max_positions: int | None
    experts: int | None
    linear_modules: tuple[str, ...]
    has_weights: bool | None
    fingerprint: str
    layer_kinds: tuple[str, ...] = ()
    fused_experts: bool = False


@dataclass(frozen=True)
class DatasetProfile:
    """What a tokenised dataset looks like.

    Attributes:
        name: what the user wrote.
        format: which of TRL's dataset formats it is in, such as ``messages`` or ``prompt+completion``.
        columns: its columns as loaded.
        lengths: tokens per row, before any truncation; of the longest sequence where a row has several.
        trainable_tokens: tokens that the loss counts (label not -100).
        tokenized_directory: where ``datasets.Dataset.save_to_disk`` put the tokenised rows.
        fingerprint: hash of the tokenised rows.
        several: the lengths of rows that send several sequences through the model, or that can be dropped whole; None
            where each is one sequence, which ``lengths`` tells all about.
    """

    name: str
    format: str
    columns: tuple[str, ...]
    lengths: LengthDistribution
    trainable_tokens: int
    tokenized_directory: str
    fingerprint: str
    several: Documents | None = None

    @cached_property
    def documents(self) -> Documents:
        """The lengths of the rows, whatever they are made of."""
        return self.several or Documents.of_lengths(self.lengths)


@dataclass(frozen=True)
class PackingCheck:
    """Whether one attention implementation keeps packed documents apart on this architecture.

    Attributes:
        attention: the implementation, in the words of ``attn_implementation``.
        supported: whether the architecture runs with it at all on this device.
        separates: whether packed logits equal separate logits.
        max_difference: largest absolute difference of logits, or None when it did not run.
        tolerance: the difference up to which they count as equal.
        reason: why not, in words; empty when it separates.
    """

    attention: str
    supported: bool
    separates: bool
    max_difference: float | None
    tolerance: float
    reason: str = ""


@dataclass(frozen=True)
class Workload:
    """What is to be trained: model, dataset and trainer.

    Attributes:
        packing_checks: the result of the packed-against-separate self-test by attention implementation.
    """

    trainer: str
    model_source: ModelSource
    dataset_source: DatasetSource
    model: ModelProfile
    dataset: DatasetProfile
    packing_checks: dict[str, PackingCheck] = field(default_factory=dict)

    @property
    def summary(self) -> Workload:
        """The same for documents that are written: without the lengths of each row's parts, which are many."""
        return replace(self, dataset=replace(self.dataset, several=None))
