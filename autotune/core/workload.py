"""The workload: the model, the dataset and the trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil
from typing import Literal

from autotune.core.documents import Documents
from autotune.core.images import ImageProfile
from autotune.core.lengths import LengthDistribution

Init = Literal["random", "pretrained"]

CUSTOM_CODE = "contains custom code"
"""Part of transformers' error about a model whose code is not trusted (``resolve_trust_remote_code``)."""
CHAT_TEMPLATE = "chat_template_path"
"""The field of TRL's configurations that names a chat template in place of the tokenizer's."""
IGNORED_LABEL = -100
"""Label of tokens that the loss ignores: ``ignore_index`` of ``torch.nn.CrossEntropyLoss``, which TRL uses."""


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from.

    Attributes:
        name: hub id, or absolute path of a local directory, or of a file with a model's configuration.
        init: ``random`` builds weights from the configuration; ``pretrained`` loads them.
        revision: hub revision.
        tokenizer: whether it has a tokenizer, as it must for rows to be tokenised; otherwise a stand-in is taken.
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
        config: the configuration, where the dataset has several; None: the only one.
        mixture: entries of TRL's ``datasets``, each with the fields of ``trl.scripts.utils.DatasetConfig``, in place of
            the others above but the name; empty for a dataset that those describe.
        test_size: rows that ``datasets.Dataset.train_test_split`` keeps from training, at random; None: none.
        reading: fields of the trainer's configuration by which it reads the rows, such as ``dataset_text_field``, where
            the user set them.
    """

    name: str
    path: str
    data_files: str | None = None
    split: str = "train"
    config: str | None = None
    mixture: tuple[Mapping[str, object], ...] = ()
    test_size: object = None
    reading: Mapping[str, object] = field(default_factory=dict)

    @property
    def places(self) -> tuple[str, ...]:
        """The places it is read from: files, directories and hub ids, and the file of a chat template."""
        template = self.reading.get(CHAT_TEMPLATE)
        found = [str(template)] if template is not None else []
        if not self.mixture:
            return (self.data_files or self.path, *found)
        for item in self.mixture:
            files = item.get("data_files")
            if isinstance(files, Mapping):
                files = list(files.values())
            listed = files if isinstance(files, list | tuple) else [files or item.get("data_dir") or item.get("path")]
            found += map(str, listed)
        return tuple(found)


NO_DATA = "a stand-in for data"
"""The name of rows that are read where lengths are given in place of data: they have no columns of the user's."""


@dataclass(frozen=True)
class Rollouts:
    """Prompts, and the generation and scoring of their completions, for trainers that generate.

    Attributes:
        rewards: reward functions, in the words of TRL's ``reward_funcs``; empty: one of TRL's own that costs nothing.
        mean_tokens: mean length of typical completions; None: half of the maximum.
        column: a column of the dataset that holds typical completions as text, or None.
        prompt_coverage: share of the prompts, above 0 and up to 1, that is kept at least; the longest are dropped.
    """

    rewards: tuple[str, ...] = ()
    mean_tokens: int | None = None
    column: str | None = None
    prompt_coverage: float = 1.0


@dataclass(frozen=True)
class KeyValueCache:
    """Size of a model's key-value cache for each token, without its type.

    Attributes:
        layers: layers that cache; layers of linear attention, which have a state of fixed size, do not.
        heads: heads of keys and values in each.
        elements: numbers of a head for each token, of its key and its value together.
    """

    layers: int
    heads: int
    elements: int


@dataclass(frozen=True)
class ModelProfile:
    """The properties of a model that its configuration and tokenizer determine; read by building it without storage.

    Attributes:
        name: the user's name of it, or its absolute path.
        model_type: transformers' name of the architecture, such as ``qwen2``.
        architecture: name of the model's class, such as ``Qwen2ForCausalLM``.
        parameters: number of weights.
        layers: number of transformer layers.
        vocabulary: rows of the embedding.
        max_positions: largest number of positions that the model supports, or None if it has no limit.
        linear_modules: last names of the linear modules inside the layers, such as ``q_proj``.
        has_weights: whether loadable weights lie next to the configuration (None: on the hub, not looked up).
        fingerprint: hash of the configuration and the tokenizer.
        layer_kinds: a word for each layer; layers with equal words have the same structure.
        fused_experts: whether one parameter holds the weights of all experts of a layer.
        cache: its key-value cache, as if every layer attended to all tokens; None if the configuration lacks it.
        attention_heads: heads of queries in a layer; None if the configuration lacks it.
        grouped_heads: whether several of these share a head of keys and values.
        router_aux_loss_coef: weight that its configuration gives the loss that balances experts; 0 without one.
        quantizable: number of weights in the linear modules inside the layers, which are held in 4 bits if any are.
        dtype: PyTorch's name of the type that ``dtype: auto`` means; empty if it is not known.
        accepts_loss_kwargs: whether transformers' Trainer divides its loss by the tokens of a whole step.
        largest_weight: numbers in the largest of its weights, mostly the embedding.
        bidirectional_images: whether tokens of an image attend to one another, the later ones included.
        language_modules: the ``linear_modules`` of the language model beside a vision tower; empty without one.
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


@dataclass(frozen=True)
class DroppedRows:
    """The rows of a dataset that are dropped since their prompts are the longest.

    Attributes:
        rows: number of them; all rows with a longer prompt than ``longest_kept``.
        longest_kept: tokens of the longest prompt that is kept.
        longest: number in the dataset, from 1 on, and tokens of the prompt of the longest of them, the longest first.
    """

    rows: int
    longest_kept: int
    longest: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class DatasetProfile:
    """The properties of a tokenised dataset.

    Attributes:
        name: the user's name of it.
        format: its format of TRL's, such as ``messages`` or ``prompt+completion``.
        columns: its columns as loaded.
        lengths: tokens per row, before any truncation; of the longest sequence if a row has several.
        trainable_tokens: tokens that the loss counts (label not -100).
        tokenized_directory: directory of the tokenised rows (``datasets.Dataset.save_to_disk``).
        fingerprint: hash of the tokenised rows.
        completions: lengths of typical completions from the dataset's column, in tokens; None without one.
        several: the lengths of rows that send several sequences through the model, that can be dropped whole, or whose
            order matters; None if each row is one sequence, for which ``lengths`` is enough.
        dropped: the rows of the user's dataset that are no part of all this; None if there are none.
        images: the sizes of its images; None for rows of text.
        remarks: silent behaviour of the trainer on it, in sentences.
    """

    name: str
    format: str
    columns: tuple[str, ...]
    lengths: LengthDistribution
    trainable_tokens: int
    tokenized_directory: str
    fingerprint: str
    several: Documents | None = None
    completions: LengthDistribution | None = None
    dropped: DroppedRows | None = None
    images: ImageProfile | None = None
    remarks: tuple[str, ...] = ()

    @cached_property
    def documents(self) -> Documents:
        """The lengths of the rows, of one sequence or several."""
        return self.several or Documents.of_lengths(self.lengths)

    @property
    def summary(self) -> DatasetProfile:
        """The profile as it is written to documents: without the sizes of each row, which are many."""
        return replace(self, several=None, images=self.images and replace(self.images, rows=None))

    def up_to(self, tokens: int) -> DatasetProfile:
        """Return the lengths of the rows whose longest sequence has at most so many tokens; the rest stays as it is."""
        return replace(self, lengths=self.lengths.up_to(tokens), several=self.several and self.several.up_to(tokens))


@dataclass(frozen=True)
class PackingCheck:
    """Whether one attention implementation keeps packed documents apart on this architecture.

    Attributes:
        attention: the implementation, as a value of ``attn_implementation``.
        supported: whether the architecture runs with it on this device.
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
    """The model, the dataset and the trainer.

    Attributes:
        packing_checks: result of the self-test that compares packed with separate logits, by attention implementation.
        rollouts: the completions, for trainers that generate them.
        evaluation_source, evaluation: the rows that training is evaluated on; None without evaluation.
        absent: plan entries of techniques, such as ``args.FIELD``, for which the installed TRL has no field.
        teacher_source, teacher: the model that the trained one is to imitate; None for trainers without one.
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
        """Hash of the configuration and tokenizer of the model, and of its teacher's if it has one."""
        return "+".join(model.fingerprint for model in (self.model, self.teacher) if model is not None)

    @property
    def profiles(self) -> tuple[DatasetProfile, ...]:
        """The rows to train on, and those to evaluate on if there are any: TRL cuts both to the same length."""
        return tuple(profile for profile in (self.dataset, self.evaluation) if profile is not None)

    @property
    def rows_split_off(self) -> int:
        """The rows of the dataset that TRL splits off for evaluation (``test_split_size``); 0 where it does not."""
        size, every = self.dataset_source.test_size, self.dataset.documents.rows
        if not isinstance(size, float | int):
            return 0
        # Of a number below 1, datasets.Dataset.train_test_split makes a share.
        return ceil(size * every) if size < 1 else int(size)

    @property
    def rows_trained(self) -> int:
        """The rows of the dataset that are left to train on."""
        return self.dataset.documents.rows - self.rows_split_off

    @property
    def has_images(self) -> bool:
        """Whether rows to train on or to evaluate on have images."""
        return any(profile.images is not None for profile in self.profiles)

    @property
    def names_images(self) -> bool:
        """Whether rows name the files of their images."""
        return any(profile.images is not None and profile.images.by_path for profile in self.profiles)

    @property
    def documents(self) -> tuple[Documents, ...]:
        """The lengths of :attr:`profiles`."""
        return tuple(profile.documents for profile in self.profiles)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence in all of them: the maximum length at which nothing is cut."""
        return max(documents.longest for documents in self.documents)

    @property
    def least_length(self) -> int:
        """The smallest maximum length with which every row with images can be trained on; 0 without images.

        TRL fails where a token of an image is cut, and drops no row with images of which nothing is left to train on.
        """
        pictured = [(each.images, each.documents) for each in self.profiles if each.images is not None]
        return max((max(images.ends.longest, documents.last_kept) for images, documents in pictured), default=0)

    def needs_no_limit(self, max_length: object) -> bool:
        """Return whether a maximum length is written as none.

        With images, TRL fails on a row that is longer than these and whose image it cuts; none of these is cut.
        """
        return self.has_images and max_length == self.longest

    @property
    def summary(self) -> Workload:
        """The workload as it is written to documents; see :attr:`DatasetProfile.summary`."""
        return replace(self, dataset=self.dataset.summary, evaluation=self.evaluation and self.evaluation.summary)
