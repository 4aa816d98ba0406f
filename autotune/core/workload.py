"""The workload: sources and properties of the model and the dataset, and the trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil
from typing import Literal

from autotune.core.rows.documents import Documents
from autotune.core.rows.images import ImageProfile
from autotune.core.rows.lengths import LengthDistribution

Init = Literal["random", "pretrained"]

CUSTOM_CODE = "contains custom code"
"""Part of transformers' error about a model with untrusted code (``resolve_trust_remote_code``)."""
CHAT_TEMPLATE = "chat_template_path"
"""The field of TRL's configurations with a chat template that replaces the tokenizer's."""
UNUSED_COLUMNS = "remove_unused_columns"
"""The field of transformers' arguments that removes the columns that a trainer does not declare."""
IGNORED_LABEL = -100
"""Label of tokens that the loss ignores: ``ignore_index`` of ``torch.nn.CrossEntropyLoss``, which TRL uses."""


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from.

    Attributes:
        name: hub id, or absolute path of a local directory or of a file with the model's configuration.
        init: ``random`` builds weights from the configuration; ``pretrained`` loads them.
        revision: hub revision.
        tokenizer: whether it has a tokenizer, which tokenising rows requires; otherwise a stand-in is used.
    """

    name: str
    init: Init = "random"
    revision: str = "main"
    tokenizer: bool = True


@dataclass(frozen=True)
class DatasetSource:
    """Where a dataset comes from, in the terms of ``datasets.load_dataset``.

    Attributes:
        name: the user's name of it, for messages.
        path: builder name (``json``, ``csv``, ``parquet``) for files, else a hub id or a directory.
        data_files: absolute path of a single local file, or None.
        split: the split to train on.
        config: the configuration, if the dataset has several; None: the only one.
        mixture: entries of TRL's ``datasets``, each with the fields of ``trl.scripts.utils.DatasetConfig``, which
            replace the four fields above; empty without a mixture.
        test_size: the argument of ``datasets.Dataset.train_test_split``, which splits random rows off the training
            rows; None: no split.
        reading: fields of the trainer's configuration for reading rows, such as ``dataset_text_field``, that the user
            set.
        all_splits: whether TRL loads all splits, and not only ``split``.
        prepared: whether TRL's trainer has tokenised the rows already, and dropped those that it drops.
    """

    name: str
    path: str
    data_files: str | None = None
    split: str = "train"
    config: str | None = None
    mixture: tuple[Mapping[str, object], ...] = ()
    test_size: object = None
    reading: Mapping[str, object] = field(default_factory=dict)
    all_splits: bool = field(default=False, compare=False)
    prepared: bool = False

    @property
    def places(self) -> tuple[str, ...]:
        """The files, directories and hub ids that it is read from, and the file of a chat template."""
        template = self.reading.get(CHAT_TEMPLATE)
        places = [str(template)] if template is not None else []
        if not self.mixture:
            return (self.data_files or self.path, *places)
        for item in self.mixture:
            files = item.get("data_files")
            if isinstance(files, Mapping):
                # Of each split, a file or several.
                splits = (each if isinstance(each, list | tuple) else [each] for each in files.values())
                files = [file for split in splits for file in split]
            listed = files if isinstance(files, list | tuple) else [files or item.get("data_dir") or item.get("path")]
            places += map(str, listed)
        return tuple(places)


NO_DATA = "synthetic rows"
"""The name of the dataset that is read if the user gives a length instead of data; its columns are not the user's."""


@dataclass(frozen=True)
class Rollouts:
    """The prompts, completions and rewards of trainers that generate.

    Attributes:
        rewards: reward functions, as in TRL's ``reward_funcs``; empty: one of TRL's own that costs nothing.
        mean_tokens: mean length of typical completions; None: half of the maximum.
        column: column of the dataset with typical completions as text, or None.
        prompt_coverage: least share of the prompts to keep, above 0 and up to 1; the longest are dropped.
    """

    rewards: tuple[str, ...] = ()
    mean_tokens: int | None = None
    column: str | None = None
    prompt_coverage: float = 1.0


@dataclass(frozen=True)
class KeyValueCache:
    """Size of a model's key-value cache for each token, without its type.

    Attributes:
        layers: layers with a cache; layers of linear attention have a state of fixed size instead.
        heads: key-value heads of each.
        elements: elements of a head for each token, key and value together.
    """

    layers: int
    heads: int
    elements: int


@dataclass(frozen=True)
class ModelProfile:
    """The properties of a model that follow from its configuration and tokenizer; it is built on the meta device.

    Attributes:
        name: the user's name of it, or its absolute path.
        model_type: transformers' name of the architecture, such as ``qwen2``.
        architecture: name of the model's class, such as ``Qwen2ForCausalLM``.
        parameters: number of weights.
        layers: number of transformer layers.
        vocabulary: rows of the embedding.
        max_positions: largest number of positions that the model supports, or None if it has no limit.
        lacks_attention: parts of the names of attention implementations that the architecture does not support.
        embeds_positions: whether it looks positions up in a table, so that training fails on longer rows.
        linear_modules: last names of the linear modules in the layers, such as ``q_proj``.
        has_weights: whether there are loadable weights next to the configuration (None: on the hub, not looked up).
        fingerprint: hash of the configuration and the tokenizer.
        layer_kinds: a word for each layer; layers with equal words have the same structure.
        fused_experts: whether one parameter has the weights of all experts of a layer.
        cache: its key-value cache, as if every layer attended to all tokens; None if not in the configuration.
        attention_heads: query heads of a layer; None if not in the configuration.
        grouped_heads: whether several query heads share a key-value head.
        router_aux_loss_coef: coefficient of the load-balancing loss in its configuration; 0 without one.
        quantizable: number of weights in the linear modules in the layers, which quantisation stores in 4 bits.
        dtype: PyTorch's name of the type that ``dtype: auto`` selects; empty if it is not known.
        accepts_loss_kwargs: whether transformers' Trainer divides its loss by the tokens of a whole step.
        largest_weight: elements of its largest weight, mostly the embedding.
        bidirectional_images: whether tokens of an image also attend to later tokens of that image.
        language_modules: ``linear_modules`` of the language model, for a model with a vision tower; else empty.
    """

    name: str
    model_type: str
    architecture: str
    parameters: int
    layers: int
    vocabulary: int
    max_positions: int | None
    linear_modules: tuple[str, ...]
    has_weights: bool | None
    fingerprint: str
    layer_kinds: tuple[str, ...] = ()
    fused_experts: bool = False
    cache: KeyValueCache | None = None
    attention_heads: int | None = None
    grouped_heads: bool = False
    router_aux_loss_coef: float = 0.0
    quantizable: int = 0
    dtype: str = ""
    accepts_loss_kwargs: bool = True
    largest_weight: int = 0
    bidirectional_images: bool = False
    language_modules: tuple[str, ...] = ()
    embeds_positions: bool = False
    lacks_attention: tuple[str, ...] = ()

    def beyond_positions(self, tokens: float) -> str:
        """Return a sentence on rows of ``tokens`` tokens if the model has fewer positions; else an empty one."""
        if self.max_positions is None or tokens <= self.max_positions:
            return ""
        limit = f"{self.max_positions:,} positions"
        limit = f"embeds {limit}: training fails on longer rows" if self.embeds_positions else f"was made for {limit}"
        return f"Rows have up to {tokens:,.0f} tokens, and the model {limit}."


@dataclass(frozen=True)
class DroppedRows:
    """The rows of a dataset that are dropped for their long prompts.

    Attributes:
        rows: number of dropped rows: all with a longer prompt than ``longest_kept``.
        longest_kept: tokens of the longest prompt that is kept.
        longest: the longest dropped prompts, the longest first: row number, from 1, and tokens.
    """

    rows: int
    longest_kept: int
    longest: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class DatasetProfile:
    """The properties of a tokenised dataset.

    Attributes:
        name: the user's name of it.
        format: TRL's name of its format, such as ``messages`` or ``prompt+completion``.
        columns: its columns as loaded.
        lengths: tokens per row, before any truncation; of the longest sequence if a row has several.
        trainable_tokens: tokens that the loss counts (label not -100).
        tokenized_directory: directory of the tokenised rows (``datasets.Dataset.save_to_disk``).
        fingerprint: hash of the tokenised rows.
        completions: lengths of typical completions from the dataset's column, in tokens; None without one.
        several: the lengths of rows with several sequences, that can be dropped whole, or whose order matters; None if
            each row is one sequence, for which ``lengths`` is enough.
        exchanged: the lengths of sequences that the trainer makes of parts of several rows (KTO's mismatched pairs),
            which a maximum length cuts as well; None if it makes none.
        dropped: the dropped rows, which the other figures exclude; None without any.
        images: the sizes of its images; None for rows of text.
        remarks: silent behaviour of the trainer on it, in sentences.
        documents_of_row: number of documents that the trainer makes of each row.
    """

    name: str
    format: str
    columns: tuple[str, ...]
    lengths: LengthDistribution
    trainable_tokens: int
    tokenized_directory: str
    fingerprint: str
    several: Documents | None = None
    exchanged: Documents | None = None
    completions: LengthDistribution | None = None
    dropped: DroppedRows | None = None
    images: ImageProfile | None = None
    remarks: tuple[str, ...] = ()
    documents_of_row: int = 1

    @cached_property
    def documents(self) -> Documents:
        """The lengths of the rows, of one sequence or several."""
        return self.several or Documents.of_lengths(self.lengths)

    @property
    def summary(self) -> DatasetProfile:
        """The profile for documents, without the sizes of each row."""
        return replace(self, several=None, exchanged=None, images=self.images and replace(self.images, rows=None))

    def up_to(self, tokens: int) -> DatasetProfile:
        """Return the profile with the lengths of the rows whose longest sequence has at most ``tokens`` tokens."""
        return replace(self, lengths=self.lengths.up_to(tokens), several=self.several and self.several.up_to(tokens))


@dataclass(frozen=True)
class PackingCheck:
    """Whether one attention implementation keeps packed documents apart on this architecture.

    Attributes:
        attention: the implementation, as a value of ``attn_implementation``.
        supported: whether the architecture runs with it on this device.
        separates: whether packed logits equal separate logits.
        max_difference: largest absolute difference of logits, or None if it did not run.
        tolerance: the difference up to which logits count as equal.
        reason: why it does not separate them; empty if it does.
    """

    attention: str
    supported: bool
    separates: bool
    max_difference: float | None
    tolerance: float
    reason: str = ""


@dataclass(frozen=True)
class Workload:
    """The model, the dataset and the trainer.

    Attributes:
        packing_checks: result of the self-test that compares packed with separate logits, by attention implementation.
        rollouts: prompts and completions, for trainers that generate.
        evaluation_source, evaluation: the rows to evaluate on; None without evaluation.
        absent: plan entries of techniques, such as ``args.FIELD``, for which the installed TRL has no field.
        teacher_source, teacher: the teacher model; None for trainers without one.
    """

    trainer: str
    model_source: ModelSource
    dataset_source: DatasetSource
    model: ModelProfile
    dataset: DatasetProfile
    packing_checks: dict[str, PackingCheck] = field(default_factory=dict)
    evaluation_source: DatasetSource | None = None
    evaluation: DatasetProfile | None = None
    rollouts: Rollouts = field(default_factory=Rollouts)
    absent: tuple[str, ...] = ()
    teacher_source: ModelSource | None = None
    teacher: ModelProfile | None = None

    @property
    def models_fingerprint(self) -> str:
        """Hash of the configurations and tokenizers of the model and of its teacher, if any."""
        return "+".join(model.fingerprint for model in (self.model, self.teacher) if model is not None)

    @property
    def profiles(self) -> tuple[DatasetProfile, ...]:
        """The rows to train on, and those to evaluate on, if any; TRL cuts both to the same length."""
        return tuple(profile for profile in (self.dataset, self.evaluation) if profile is not None)

    @property
    def documents_split_off(self) -> int:
        """Number of documents that TRL splits off for evaluation (``test_split_size``), or 0."""
        size, each = self.dataset_source.test_size, self.dataset.documents_of_row
        if not isinstance(size, float | int):
            return 0
        # datasets.Dataset.train_test_split reads a number below 1 as a share.
        rows = ceil(size * (self.dataset.documents.rows // each)) if size < 1 else int(size)
        return rows * each

    @property
    def documents_trained(self) -> int:
        """Number of documents left to train on."""
        return self.dataset.documents.rows - self.documents_split_off

    @property
    def has_images(self) -> bool:
        """Whether rows to train on or to evaluate on have images."""
        return any(profile.images is not None for profile in self.profiles)

    @property
    def names_images(self) -> bool:
        """Whether rows have paths of image files."""
        return any(profile.images is not None and profile.images.by_path for profile in self.profiles)

    @property
    def documents(self) -> tuple[Documents, ...]:
        """The lengths of :attr:`profiles`."""
        return tuple(profile.documents for profile in self.profiles)

    @property
    def cut_by_length(self) -> Mapping[str, Documents]:
        """The sequences that a maximum length cuts, by their origin: :attr:`documents`, and KTO's mismatched pairs."""
        found = dict(zip(("dataset's", "evaluation's"), self.documents, strict=False))
        exchanged = (profile.exchanged for profile in self.profiles)
        names = "mismatched pairs'", "evaluation's mismatched pairs'"
        return found | {name: each for name, each in zip(names, exchanged, strict=False) if each is not None}

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence of :attr:`cut_by_length`: the maximum length that cuts nothing."""
        return max(documents.longest for documents in self.cut_by_length.values())

    @property
    def least_length(self) -> int:
        """The smallest maximum length with which TRL can train on every row with images; 0 without images.

        TRL fails if a token of an image is cut, and does not drop rows with images of which nothing is left.
        """
        pictured = [(each.images, each.documents) for each in self.profiles if each.images is not None]
        return max((max(images.ends.longest, documents.last_kept) for images, documents in pictured), default=0)

    @property
    def summary(self) -> Workload:
        """The workload for documents; see :attr:`DatasetProfile.summary`."""
        return replace(self, dataset=self.dataset.summary, evaluation=self.evaluation and self.evaluation.summary)
