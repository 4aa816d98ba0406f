"""What a specification declares of TRL's class: dataset formats that it takes, and the fields of its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class DatasetFormat:
    """A format of datasets that a trainer takes.

    Attributes:
        columns: columns that the format consists of.
        tokenized: whether the rows are tokens already.
        text: whether the columns may hold text; else they hold messages.
        flags: those of the columns that hold true or false.
        documents: number of documents that the trainer creates from each row.
        with_images: whether TRL's trainer takes rows of it with images.
        named_by: the field of the trainer's configuration that may give its only column another name.
    """

    name: str
    columns: tuple[str, ...]
    tokenized: bool = False
    text: bool = True
    flags: tuple[str, ...] = ()
    documents: int = 1
    with_images: bool = False
    named_by: str = ""


@dataclass(frozen=True)
class ConfigFields:
    """A trainer's own configuration fields, which ``transformers.TrainingArguments`` lacks, by their effect on a trace.

    A contract test compares them with the installed TRL. Each is in one of these, apart from ``reading``.

    Attributes:
        traced: fields that are passed to the traced trainer unchanged.
        without_effect: fields without effect on memory and time of a step.
        others: fields that techniques write, and fields that have to be at their defaults if a user's configuration is
            traced.
        assumed: by field, what is assumed if it is set, as a sentence.
        reading: those of these fields by which the trainer reads rows; it is given them where it tokenises.
    """

    traced: frozenset[str]
    without_effect: frozenset[str]
    others: frozenset[str]
    assumed: Mapping[str, str] = field(default_factory=dict)
    reading: frozenset[str] = frozenset()

    @property
    def names(self) -> frozenset[str]:
        """All of them."""
        return self.traced | self.without_effect | self.others | self.assumed.keys()
