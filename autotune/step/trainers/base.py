"""Base class of adapters, which wrap the differences between TRL's trainers in child processes."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, ClassVar
from unittest import mock

import numpy as np
from datasets import Dataset
from transformers import AutoProcessor

from autotune.core.plan import TrainingPlan
from autotune.core.workload import Rollouts
from autotune.step.images.sizes import image_column
from autotune.step.images.tokens import with_collated
from autotune.step.models.heads import LANGUAGE_MODEL, Head
from autotune.step.rows import Counts, Flags, RowSizes, column_lengths
from autotune.trainers import find_trainer

InPhase = Callable[[str], AbstractContextManager[Any]]
"""Returns a context manager that marks the run as being in the named phase of the step program."""

TOKEN = 5
"""Token id of all tokens in the rows and completions of a trace."""
_LOADER = "create_model_from_path"


@dataclass(frozen=True)
class Drawing:
    """How a trainer's data loader draws rows of the dataset.

    Example: GRPO with 4 micro-batches of 8 rows per generation, and 8 completions per prompt, draws 4 prompts at once,
    yields each 8 times, and trains 4 micro-batches on them.

    Attributes:
        rows: dataset rows drawn at once.
        copies: consecutive copies of each row that are yielded.
        uses: micro-batches trained on rows drawn at once.
        shared: processes that yield copies of the same row.
    """

    rows: int
    copies: int = 1
    uses: int = 1
    shared: int = 1


@dataclass(frozen=True)
class Collation:
    """How the rows of a micro-batch are collated into one tensor.

    Attributes:
        flat: whether rows are concatenated; else each sequence is padded to the longest.
        multiple: number to a multiple of which the tensor's length is rounded up.
        blocks: whether micro-batches are fixed blocks of successive rows; else any rows may share a micro-batch.
        cut: maximum tokens of prompt and completion together, enforced by cutting the prompt's beginning; None: no cut.
    """

    flat: bool = False
    multiple: int = 1
    blocks: bool = False
    cut: int | None = None

    def tokens(self, sizes: RowSizes, chosen: Counts) -> Counts:
        """Return the tokens of each micro-batch, padding included.

        Args:
            chosen: indices of rows; shape (micro-batches, rows).
        """
        flattened = sizes.lengths[chosen].reshape(len(chosen), -1)
        length = self.rounded(flattened.sum(axis=1) if self.flat else flattened.max(axis=1))
        if sizes.generated is not None:
            length = self.joined(length, self.rounded(sizes.generated[chosen].max(axis=(1, 2))))
        return np.asarray(length if self.flat else length * flattened.shape[1], dtype=np.int64)

    def joined(self, prompt: Counts, completion: Counts) -> Counts:
        """Return the width of a tensor of prompts and completions, each padded separately."""
        together = prompt + completion
        return together if self.cut is None else np.maximum(completion, np.minimum(together, self.cut))

    def rounded(self, length: Counts) -> Counts:
        """Return lengths rounded up to the multiple."""
        return np.asarray(-(-length // self.multiple) * self.multiple)


@contextmanager
def _loading_by(trainer: type[Any], make_model: Callable[[], Any]) -> Iterator[None]:
    """Replace TRL's model loading function by ``make_model``, in each module of a trainer's classes."""
    with ExitStack() as patches:
        for module in {sys.modules[kind.__module__] for kind in trainer.__mro__}:
            if hasattr(module, _LOADER):
                patches.enter_context(mock.patch.object(module, _LOADER, side_effect=lambda *_, **__: make_model()))
        yield


class Adapter(ABC):
    """The child's side of one trainer: one subclass in the module of its name.

    A job first tokenises (:meth:`tokenizing`, ``columns``, :meth:`lengths`, :meth:`trainable`), once per workload. A
    probe then cuts rows (:meth:`cut`), builds TRL's trainer (:meth:`trainer_class`, :meth:`arguments`,
    :meth:`loading_models_from`), reads the sizes of its rows (:meth:`sizes`, :meth:`collation`), and selects rows of
    its batches (:meth:`select_batches`). A trace does the same with synthetic rows (:meth:`synthetic`).

    Class attributes:
        on_rows: first base of a subclass of the trainer, for tokenised rows; None if TRL's own accepts them.
        head: the head that it trains, which determines the model's class.
        processor: transformers' auto class with which it loads the tokenizer.
        columns: columns of tokenised rows, each of lists of numbers.
        collated_columns: columns that the trainer's collator reads with the images of rows
            (``_set_signature_columns_if_needed``).
        methods: by the name of a phase of the step program, the trainer's method that forms that phase.
        generating: the trainer's method that generates data for several micro-batches, such as completions; its time is
            measured separately. None if each micro-batch is trained on rows of the dataset.

    Attributes:
        specification: the specification of the trainer, which has the name of the adapter's module.
        config, trainer: TRL's classes.
    """

    on_rows: ClassVar[type[Any] | None] = None
    head: ClassVar[Head] = LANGUAGE_MODEL
    processor: ClassVar[type[Any]] = AutoProcessor
    columns: ClassVar[tuple[str, ...]]
    collated_columns: ClassVar[tuple[str, ...]] = ()
    methods: ClassVar[Mapping[str, str]] = {}
    generating: ClassVar[str | None] = None

    def __init__(self) -> None:
        self.specification = find_trainer(type(self).__module__.rpartition(".")[2])
        classes = import_module(self.specification.module)
        self.config: type[Any] = getattr(classes, self.specification.config_class)
        self.trainer: type[Any] = getattr(classes, self.specification.trainer_class)

    @property
    def module(self) -> ModuleType:
        """The module of TRL's trainer."""
        return sys.modules[self.trainer.__module__]

    @property
    def tokenizing(self) -> Mapping[str, object]:
        """Return trainer arguments that tokenise a dataset without truncation or packing."""
        return {"max_length": None, "gradient_checkpointing": False, "bf16": False, "use_cpu": True}

    def derived(self, plan: TrainingPlan) -> Mapping[str, object]:
        """Return the arguments that TRL derives from the micro-batches of a whole step, of which few are run."""
        return {}

    def tokenized(self, trainer: Any, rollouts: Rollouts, dataset: str) -> Dataset:
        """Return a trainer's tokenised rows, with :attr:`columns` and optional ones.

        Rows with images keep the columns that TRL's collator reads.

        Args:
            dataset: the user's name of the dataset, for messages.
        """
        rows = trainer.train_dataset
        if image_column(rows) is not None:
            return with_collated(trainer, self.collated(trainer), self.collated_tokens, dataset)
        optional = [name for name in self.specification.optional_columns if name in rows.column_names]
        return rows.select_columns([*self.columns, *optional])

    def collated(self, trainer: Any) -> tuple[str, ...]:
        """Return the columns of a trainer's rows with images that reach its collator, beside the images."""
        return self.collated_columns

    def collated_tokens(self, collated: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return :attr:`columns` of a row with images, given a collated micro-batch of this row alone."""
        return {name: collated[name][0] for name in self.columns}

    def lengths(self, rows: Dataset) -> Counts:
        """Return the tokens of tokenised rows in each part of the specification; shape (rows, parts).

        By default, the first columns are the parts.
        """
        return column_lengths(rows, self.columns[: len(self.specification.parts)])

    @abstractmethod
    def trainable(self, rows: Dataset) -> Counts:
        """Return the tokens of tokenised rows that the loss counts; shape (rows,)."""

    def min_kept_length(self, rows: Dataset, *, keeps_end: bool = False) -> Counts:
        """Return the smallest maximum length at which each tokenised row is kept, beyond what its lengths imply.

        Shape (rows,); 1 where a row is kept at any length.

        Args:
            keeps_end: whether rows are cut at their beginning (``truncation_mode=keep_end``).
        """
        return np.ones(len(rows), dtype=np.int64)

    def arguments(self, plan: TrainingPlan) -> Mapping[str, Any]:
        """Return further arguments of the trainer, such as reward functions."""
        return {}

    def loading_models_from(self, make_model: Callable[[], Any]) -> AbstractContextManager[object]:
        """Replace TRL's loading of further models, such as a reference, by ``make_model``.

        TRL loads them by the name of the trained model, which a model with random weights lacks. The trainer may be a
        subclass of TRL's in another module.
        """
        return _loading_by(self.trainer, make_model)

    def completions(self, rows: Dataset) -> Counts | None:
        """Return the tokens of each tokenised row's known completion; shape (rows,). None if the rows have none."""
        return None

    def cut(self, rows: Dataset, plan: TrainingPlan) -> Dataset:
        """Return the tokenised rows for the trainer, truncated if the plan truncates before it."""
        return rows

    def trainer_class(self, plan: TrainingPlan) -> type[Any]:
        """Return TRL's trainer class, or its subclass with :attr:`on_rows`, whose attributes are plan and adapter."""
        if self.on_rows is None:
            return self.trainer
        return type(self.trainer.__name__, (self.on_rows, self.trainer), {"plan": plan, "adapter": self})

    def sequences(self, rows: Dataset, length: int | None) -> Counts:
        """Return the tokens of the sequences of tokenised rows, cut to a length; shape (rows, sequences)."""
        _, *parts = self.specification.document(tuple(self.lengths(rows).T))
        sequences = np.stack(parts, axis=1)
        return sequences if length is None else sequences.clip(max=length)

    def sizes(self, trainer: Any) -> RowSizes:
        """Return the sizes of the rows that a trainer iterates over, after packing and dropping.

        By default, each part is a sequence, and none is truncated.
        """
        return RowSizes(self.lengths(trainer.train_dataset), self.trainable(trainer.train_dataset))

    def collation(self, trainer: Any) -> Collation:
        """Return how a trainer's collator joins rows."""
        return Collation(multiple=getattr(trainer.args, "pad_to_multiple_of", None) or 1)

    def drawing(self, trainer: Any) -> Drawing:
        """Return how a trainer's data loader draws rows."""
        return Drawing(trainer.args.per_device_train_batch_size)

    def evaluation_drawing(self, trainer: Any) -> Drawing:
        """Return how the data loader of an evaluation draws rows."""
        return Drawing(int(trainer.args.eval_batch_size))

    def yielded(self, trainer: Any, rows: Counts, trained: Counts) -> Counts:
        """Return rows in the order in which a data loader has to yield them, for training in a given order.

        Args:
            rows: row indices of a draw, repeated as rows are yielded.
            trained: their places in ``rows``, in the order in which they are trained.
        """
        return rows[trained]

    def select_batches(self, trainer: Any, order: Counts, worst: Flags, longest: Flags | None = None) -> Dataset:
        """Return the dataset of a run: the rows of its micro-batches, in order.

        Args:
            order: row indices, repeated as rows are yielded; shape (micro-batches, rows).
            worst: mask of the micro-batches with the most memory; shape (micro-batches,).
            longest: mask of the rows with completions of the maximum length, if completions are generated; shape
                (micro-batches, rows). None: the first one of each of these.
        """
        return trainer.train_dataset.select(order.ravel(), keep_in_memory=True)

    def packs(self, arguments: Any) -> bool:
        """Return whether a configuration packs several documents into one row."""
        return bool(getattr(arguments, "packing", False))

    def rows_and_tokens(self, trainer: Any, batch: Any) -> tuple[int, int]:
        """Return the rows and the tokens, padding included, of a micro-batch from the data loader."""
        ids = batch["input_ids"]
        return ids.shape[0], ids.numel()

    def synthetic(self, rows: Sequence[tuple[int, ...]], plan: TrainingPlan, trainable: float) -> Dataset:
        """Return tokenised rows of given sizes, for a trace; by default, the first columns are the parts.

        Args:
            rows: tokens of each row in each part of the specification.
            trainable: share of the tokens that the loss counts, if the parts do not determine it.
        """
        parts = zip(self.columns, zip(*rows, strict=True), strict=False)
        return Dataset.from_dict({name: [[TOKEN] * tokens for tokens in part] for name, part in parts})

    def watch(self, trainer: Any, in_phase: InPhase) -> None:  # noqa: B027 most trainers have no such phases
        """Make a built trainer report phases of its micro-batches that are no methods (see :attr:`methods`)."""
