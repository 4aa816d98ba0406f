"""The declarations of a trainer specification: names, dataset formats, and fields of TRL's configuration class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import ClassVar

from autotune.core.machine import DeviceKind

LOADING = "model_init_kwargs"
"""The field with arguments of ``from_pretrained`` for the trained model."""


@dataclass(frozen=True)
class DatasetFormat:
    """A dataset format that a trainer accepts.

    Attributes:
        columns: its required columns.
        tokenized: whether the rows are already tokens.
        text: whether the columns may be text; else they are messages.
        flags: the columns that are true or false.
        documents: number of documents that the trainer creates from each row.
        with_images: whether TRL's trainer accepts images in it.
        named_by: the field of the trainer's configuration that may rename its only column.
        splits: whether TRL uses the common beginning of its columns as the prompt.
    """

    name: str
    columns: tuple[str, ...]
    tokenized: bool = False
    text: bool = True
    flags: tuple[str, ...] = ()
    documents: int = 1
    with_images: bool = False
    named_by: str = ""
    splits: bool = False


@dataclass(frozen=True)
class ConfigFields:
    """A trainer's own configuration fields, which ``transformers.TrainingArguments`` lacks, by their effect on a trace.

    A contract test compares them with the installed TRL. Each is in one of these attributes, ``reading`` apart.

    Attributes:
        traced: fields that are passed to the traced trainer unchanged; a technique may write them, too.
        without_effect: fields without effect on memory and time of a step.
        others: fields that techniques set, and fields that must be at their defaults in a traced configuration.
        assumed: by field, the assumption if it is set, as a sentence.
        reading: the fields that change how rows are read and tokenised.
    """

    traced: frozenset[str] = frozenset()
    without_effect: frozenset[str] = frozenset()
    others: frozenset[str] = frozenset()
    assumed: Mapping[str, str] = field(default_factory=dict)
    reading: frozenset[str] = frozenset()

    def __or__(self, other: ConfigFields) -> ConfigFields:
        """Return the fields of both."""
        parts = ((getattr(self, each.name), getattr(other, each.name)) for each in fields(self))
        return ConfigFields(*(own | further for own, further in parts))

    @property
    def names(self) -> frozenset[str]:
        """All of them."""
        return self.traced | self.without_effect | self.others | self.assumed.keys()


class Declared:
    """The declarations of a specification for one trainer of TRL.

    Class attributes:
        label: its name in messages, such as ``Online DPO``; its other names and those of TRL's classes follow from it.
        title: its purpose, as the first words of a script.
        formats: dataset formats, in the order in which the trainer looks for them.
        optional_columns: columns that the trainer uses in any format if a dataset has them.
        further_columns: further columns that TRL's trainer reads if rows have them.
        of_tokens: the further columns with a number for each token.
        masks: the further columns with a flag for each token, a number or true or false.
        parts: names of the parts of a row, in the order of the lengths of :meth:`document`.
        config_fields: the fields of its configuration, which determine its techniques.
        stand_in: columns of a row that replaces data if a length is given instead.
        ordered: whether micro-batches are blocks of successive rows of the dataset, instead of random rows.
        shuffled_by: the switch for random order, if the trainer ignores ``train_sampling_strategy``.
        fewest_rows: the smallest micro-batch, in rows, that TRL accepts with every loss; a dataset may have fewer rows.
        generates: whether it trains on completions that the model generates.
        scores: whether reward functions score these completions.
        has_teacher: whether it needs a teacher model.
        evaluates: whether TRL's trainer can evaluate while training.
        has_command: whether there is a command ``trl NAME``.
        ignores_bias_buffers: whether TRL's script has ``ignore_bias_buffers``, which changes no step.
        takes_images: whether probes and traces support rows with images.
        module: the TRL module of its classes.
        loads_by_name: whether the trainer, given a model's name, also loads its tokenizer, its reference and quantised
            weights; else the script that builds it does.
        loads_adapters: whether TRL loads its model by an auto class of transformers, which takes an adapter's directory
            for the model that it names.
        document_noun: name of the rows of a global batch, in the plural.
        peculiarities: differences of TRL's class from the other trainers and their cost, in sentences for reports.
        text_peculiarities: further ones, which rows with images do not have.
        advice: by columns of an unsupported format, the way to a supported one, as a sentence.
        cpu_args: arguments for training on a CPU; :meth:`device_args` has those of any device.
        loads_with: the fields with keyword arguments for loading models.
        also_set: by the path of a switch in a plan, such as ``model.use_peft``, the further entries that this trainer
            needs if the switch is on.
    """

    label: ClassVar[str]
    title: ClassVar[str]
    formats: ClassVar[tuple[DatasetFormat, ...]]
    optional_columns: ClassVar[tuple[str, ...]] = ()
    # As ``_prepare_dataset`` and the collators for images read them (trl 1.16).
    further_columns: ClassVar[tuple[str, ...]] = ("tools", "chat_template_kwargs", "image", "images")
    of_tokens: ClassVar[tuple[str, ...]] = ()
    masks: ClassVar[tuple[str, ...]] = ()
    parts: ClassVar[tuple[str, ...]]
    config_fields: ClassVar[ConfigFields]
    stand_in: ClassVar[Mapping[str, object]]
    ordered: ClassVar[bool] = False
    shuffled_by: ClassVar[str | None] = None
    fewest_rows: ClassVar[int] = 1
    generates: ClassVar[bool] = False
    scores: ClassVar[bool] = False
    has_teacher: ClassVar[bool] = False
    evaluates: ClassVar[bool] = True
    has_command: ClassVar[bool] = True
    ignores_bias_buffers: ClassVar[bool] = False
    takes_images: ClassVar[bool] = False
    module: ClassVar[str] = "trl"
    loads_by_name: ClassVar[bool] = True
    loads_adapters: ClassVar[bool] = False
    document_noun: ClassVar[str] = "documents"
    peculiarities: ClassVar[tuple[str, ...]] = ()
    text_peculiarities: ClassVar[tuple[str, ...]] = ()
    advice: ClassVar[Mapping[tuple[str, ...], str]] = {}
    # transformers refuses bf16 without a GPU unless use_cpu is set (TrainingArguments).
    cpu_args: ClassVar[Mapping[str, object]] = {"use_cpu": True}
    loads_with: ClassVar[tuple[str, ...]] = (LOADING,)
    also_set: ClassVar[Mapping[str, Mapping[str, object]]] = {}

    def device_args(self, kind: DeviceKind, *, in_group: bool) -> Mapping[str, object]:
        """Return the arguments for training on a device, by their paths.

        A single process loads weights to its GPU: TRL's default, ``device_map="auto"``, may put layers on the CPU
        instead of failing if memory is short, and None loads to the host first. With a process group, TRL loads to the
        host (``create_model_from_path`` and its callers), and transformers refuses a device with ZeRO-3.
        """
        device_map = None if in_group else {"": 0}
        return self.cpu_args if kind == "cpu" else {f"{field}.device_map": device_map for field in self.loads_with}

    @property
    def name(self) -> str:
        """Its name in ``trl`` and ``--trainer``, such as ``online_dpo``."""
        return self.label.replace(" ", "_").lower()

    @property
    def config_class(self) -> str:
        """The name of TRL's class of its configuration, such as ``DPOConfig``."""
        return f"{self.label.replace(' ', '')}Config"

    @property
    def trainer_class(self) -> str:
        """The name of TRL's class, such as ``DPOTrainer``."""
        return f"{self.label.replace(' ', '')}Trainer"

    @property
    def fields(self) -> frozenset[str]:
        """The fields of its configuration that ``transformers.TrainingArguments`` lacks."""
        return self.config_fields.names

    @property
    def wanted_columns(self) -> str:
        """The required columns of its formats."""
        return " | ".join(" and ".join(form.columns) for form in reversed(self.formats))
