"""A user's configuration of a training, as the values of the fields of TRL's classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from autotune.core.plan import NO_EVALUATION

MODEL_CONFIG = "ModelConfig"
"""The class of TRL that configures how the model is loaded and which adapter is trained."""
SCRIPT_ARGUMENTS = "ScriptArguments"
MIXTURE = "DatasetMixtureConfig"
TRACKERS = "report_to"
"""The argument that names trackers, to which no probe reports."""


@dataclass(frozen=True)
class Configuration:
    """One of TRL's configurations.

    Attributes:
        kind: the name of its class, such as ``DPOConfig``.
        values: its fields, in JSON's types.
        defaults: default values of the class.
    """

    kind: str
    values: Mapping[str, object]
    defaults: Mapping[str, object]

    @property
    def evaluates(self) -> bool:
        """Whether training is evaluated."""
        return self.values.get("eval_strategy", NO_EVALUATION) != NO_EVALUATION


def configured(item: Any, kind: str, plain: Callable[[Any], object]) -> Configuration:
    """Return the values of an object of one of TRL's classes, and what the class has by default.

    Args:
        kind: the name of the class.
        plain: converts a value into JSON's types.
    """
    defaults = {
        each.name: each.default_factory() if callable(each.default_factory) else each.default for each in fields(item)
    }
    values = {name: plain(getattr(item, name, default)) for name, default in defaults.items()}
    return Configuration(kind, values, {name: plain(default) for name, default in defaults.items()})


@dataclass(frozen=True)
class Fault:
    """A key with an unknown name or an invalid value.

    Attributes:
        key: the key, as written.
        message: the problem, as the rest of a sentence that begins with the key.
        unknown: whether nothing takes a key of that name.
    """

    key: str
    message: str
    unknown: bool = False


@dataclass(frozen=True)
class Override:
    """A field to which TRL or transformers gives another value than the user did.

    Attributes:
        given, used: both values, in JSON's types.
    """

    key: str
    given: object
    used: object


@dataclass(frozen=True)
class Built:
    """The result of building a trainer's class from a plan.

    Attributes:
        refused: the error by which TRL or one of its libraries refused the plan; empty if none did.
        overrides: arguments that the class changed.
        warnings: its warnings, raised or logged.
    """

    refused: str = ""
    overrides: tuple[Override, ...] = ()
    warnings: tuple[str, ...] = ()


NOT_COMPILED = "no"
"""accelerate's ``dynamo_backend`` with which it compiles nothing."""


@dataclass(frozen=True)
class Launched:
    """A start of processes, as accelerate's own launcher reads its options and its file.

    Attributes:
        processes: number over all machines; 1 if nothing sets it.
        counted: whether something sets the number.
        machines: number of machines.
        file: the path of the file that accelerate reads; empty without one.
        engine: the ``distributed_type`` by which accelerate starts the processes.
        ignored_processes: the number that is asked for, if a single one is started nevertheless; else 0.
        precision: the ``mixed_precision`` that accelerate passes to the processes.
        precision_by_option: whether an option sets that, which overrides the file.
        refused: the error that accelerate ends with; empty if it starts the processes.
        gpu_ids: the GPUs that accelerate makes visible; empty if it leaves that to ``CUDA_VISIBLE_DEVICES``.
        dynamo: the ``dynamo_backend`` that accelerate passes to the processes; ``no`` if it compiles nothing.
    """

    processes: int = 1
    counted: bool = False
    machines: int = 1
    file: str = ""
    engine: str = "NO"
    ignored_processes: int = 0
    precision: str = "no"
    precision_by_option: bool = False
    refused: str = ""
    gpu_ids: str = ""
    dynamo: str = NOT_COMPILED


@dataclass(frozen=True)
class ReadCommand:
    """A command as read by TRL's own parser.

    Attributes:
        configurations: by the name of the class. Empty if the parser refused the command.
        faults: every key that is unknown or has a value of a wrong type.
        overrides: fields whose values TRL's classes changed.
        launch: keys and values that ``trl`` hands on to ``accelerate launch``.
        launched: the start by ``accelerate launch``; None where another launcher starts the processes, or where the
            parser refused the command.
        names: every key that the classes and ``accelerate launch`` take.
        refused: the error by which the parser or a class refused the command; empty if none did.
        warnings: warnings of the classes.
        absent: what this machine lacks of the packages that arguments need, in words, by argument.
    """

    configurations: Mapping[str, Configuration] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()
    overrides: tuple[Override, ...] = ()
    launch: Mapping[str, object] = field(default_factory=dict)
    launched: Launched | None = None
    names: tuple[str, ...] = ()
    refused: str = ""
    warnings: tuple[str, ...] = ()
    absent: Mapping[str, str] = field(default_factory=dict)

    @property
    def script(self) -> Mapping[str, object]:
        """The values of the arguments of TRL's script; empty without one."""
        return next((item.values for name, item in self.configurations.items() if name.endswith(SCRIPT_ARGUMENTS)), {})
