"""The child side of a trainer: TRL's classes, and what differs in TRL between trainers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from datasets import Dataset

from autotune.core.plan import TrainingPlan
from autotune.step.rows import Counts, RowSizes

MakeModel = Callable[[], Any]
"""Builds another model like the trained one, with random weights where that has them, on the same device."""
InPhase = Callable[[str], AbstractContextManager[Any]]
"""Returns, for the name of a phase of the step program, a context manager that marks the run as being in it."""


@dataclass(frozen=True)
class Collation:
    """How the rows of a micro-batch are collated into one tensor.

    Attributes:
        flat: whether they are concatenated; else each sequence is padded to the longest.
        multiple: the length of the tensor is rounded up to a multiple of this.
        blocks: whether micro-batches are blocks of successive rows, always the same ones; else any rows may meet.
    """

    flat: bool = False
    multiple: int = 1
    blocks: bool = False

    def tokens(self, lengths: Counts) -> Counts:
        """Return the tokens of each micro-batch, padding included.

        Args:
            lengths: lengths of the sequences; shape (micro-batches, rows, sequences).
        """
        flattened = lengths.reshape(len(lengths), -1)
        length = flattened.sum(axis=1) if self.flat else flattened.max(axis=1)
        rounded = -(-length // self.multiple) * self.multiple
        return np.asarray(rounded if self.flat else rounded * flattened.shape[1], dtype=np.int64)


class Adapter(ABC):
    """The child's side of one trainer. A subclass is one file, and its only instance is ``ADAPTER``.

    A job first tokenises (:meth:`tokenizing`, ``columns``, :meth:`lengths`, :meth:`trainable`), once per workload. A
    probe then cuts rows (:meth:`cut`), builds TRL's trainer (:meth:`trainer_class`, :meth:`beside_model`), reads the
    sizes of its rows (:meth:`sizes`, :meth:`collation`), and selects rows in the order of its batches. A
    trace does the same with rows of its own (:meth:`synthetic`).

    Class attributes:
        name: the trainer's name.
        config, trainer: TRL's classes.
        columns: columns of tokenised rows, each of lists of numbers.
        methods: by the name of a phase of the step program, the trainer's method that forms that phase.
    """

    name: ClassVar[str]
    config: ClassVar[type[Any]]
    trainer: ClassVar[type[Any]]
    columns: ClassVar[tuple[str, ...]]
    methods: ClassVar[Mapping[str, str]] = {}

    @property
    def tokenizing(self) -> Mapping[str, object]:
        """Return the arguments with which the trainer tokenises a dataset without cutting or packing it."""
        return {"max_length": None, "gradient_checkpointing": False, "bf16": False, "use_cpu": True}

    @abstractmethod
    def lengths(self, rows: Dataset) -> Counts:
        """Return the tokens of tokenised rows in each part of the specification; shape (rows, parts)."""

    @abstractmethod
    def trainable(self, rows: Dataset) -> Counts:
        """Return the tokens of tokenised rows that the loss counts; shape (rows,)."""

    def kept_from(self, rows: Dataset) -> Counts:
        """Return the smallest maximum length at which each tokenised row is kept, beyond what its lengths imply.

        Shape (rows,); 1 where a row is kept at any length.
        """
        return np.ones(len(rows), dtype=np.int64)

    def beside_model(self, plan: TrainingPlan | None, make_model: MakeModel) -> Mapping[str, Any]:
        """Return further arguments of the trainer, such as a reference model.

        TRL loads those by the name of the trained model, which a model of random weights does not have.

        Args:
            plan: None where rows are only tokenised.
        """
        return {}

    def cut(self, rows: Dataset, plan: TrainingPlan) -> Dataset:
        """Return tokenised rows as the plan passes them to the trainer."""
        return rows

    def trainer_class(self, plan: TrainingPlan) -> type[Any]:
        """Return the trainer class: TRL's own, or a subclass of it that takes tokenised rows."""
        return self.trainer

    @abstractmethod
    def sizes(self, trainer: Any) -> RowSizes:
        """Return the sizes of the rows that a trainer iterates over, after it has packed or dropped some."""

    def collation(self, trainer: Any) -> Collation:
        """Return how a trainer's collator joins rows."""
        multiple = trainer.args.pad_to_multiple_of
        return Collation(multiple=multiple if isinstance(multiple, int) else 1)

    def packs(self, arguments: Any) -> bool:
        """Return whether the trainer puts several documents into one row, given its configuration."""
        return False

    @abstractmethod
    def collated(self, inputs: Mapping[str, Any]) -> tuple[int, int]:
        """Return the rows and the tokens, padding included, of the tensor of a micro-batch."""

    @abstractmethod
    def synthetic(
        self, rows: Sequence[tuple[int, ...]], plan: TrainingPlan, arguments: Any, trainable: float
    ) -> Dataset:
        """Return tokenised rows of given sizes, for a trace.

        Args:
            rows: for each row, the tokens in each part of the specification.
            arguments: the trainer's configuration as planned.
            trainable: share of the tokens that the loss counts, where the parts do not determine it.
        """

    def pass_seconds_per_row(self, trainer: Any) -> Mapping[str, float]:
        """Return the seconds per row of phases that run once over the whole dataset, by phase name."""
        return {}

    def watch(self, trainer: Any, in_phase: InPhase) -> None:  # noqa: B027 most trainers have no such phases
        """Make a built trainer report phases inside its micro-batches that are not methods of their own."""
