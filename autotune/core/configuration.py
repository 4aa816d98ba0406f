"""A user's configuration as TRL reads it: field values of TRL's classes, faults, overrides and the launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from autotune.core.files.nested import mapping
from autotune.core.plan import EVALUATED_ONCE, NO_EVALUATION

MODEL_CONFIG = "ModelConfig"
"""TRL's class of arguments for loading the model and for its adapter."""
SCRIPT_ARGUMENTS = "ScriptArguments"
MIXTURE = "DatasetMixtureConfig"
TRACKERS = "report_to"
"""The argument that names trackers; probes do not report to any."""
DISPATCHING = ("accelerator_config", "dispatch_batches")
"""The field and its key by which accelerate's first process reads the micro-batches of all."""


@dataclass(frozen=True)
class Configuration:
    """The values of an object of one of TRL's classes of arguments.

    Attributes:
        kind: the name of the class, such as ``DPOConfig``.
        values: its fields, in JSON's types.
        defaults: the fields' default values.
    """

    kind: str
    values: Mapping[str, object]
    defaults: Mapping[str, object]

    @property
    def evaluates(self) -> bool:
        """Whether training is evaluated: between steps, or before the first one."""
        return self.evaluates_between_steps or bool(self.values.get(EVALUATED_ONCE))

    @property
    def evaluates_between_steps(self) -> bool:
        """Whether training is evaluated between steps."""
        return self.values.get("eval_strategy", NO_EVALUATION) != NO_EVALUATION

    def keys(self, name: str) -> Mapping[str, object]:
        """Return the keys of a field that has a mapping, or an object of a dataclass; empty for any other value."""
        value = self.values.get(name)
        return vars(value) if is_dataclass(value) else mapping(value)

    @property
    def dispatches(self) -> bool:
        """Whether accelerate's first process reads the micro-batches of all."""
        name, key = DISPATCHING
        return bool(self.keys(name).get(key))


def read_object(item: Any, kind: str, plain: Callable[[Any], object]) -> Configuration:
    """Return the values and defaults of the fields of an object of one of TRL's classes.

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
        unknown: whether no class has a field of that name.
    """

    key: str
    message: str
    unknown: bool = False


@dataclass(frozen=True)
class Override:
    """A field whose value TRL or transformers replaced by another.

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
        warnings: its warnings, raised or logged.
    """

    refused: str = ""
    warnings: tuple[str, ...] = ()


NOT_COMPILED = "no"
"""The ``dynamo_backend`` of accelerate that compiles nothing."""


@dataclass(frozen=True)
class Launched:
    """A launch as ``accelerate launch`` resolves it from its options and its file.

    Attributes:
        processes: number over all machines; 1 if neither options nor file set it.
        sets_processes: whether options or file set the number.
        machines: number of machines.
        file: the path of the file that accelerate reads; empty without one.
        engine: the ``distributed_type`` of the launch.
        ignored_processes: the requested number, if accelerate starts a single process nevertheless; else 0.
        precision: the ``mixed_precision`` that accelerate passes to the processes.
        precision_by_option: whether an option sets ``precision``, which overrides the file.
        refused: accelerate's error; empty if it starts the processes.
        gpu_ids: the GPUs that accelerate makes visible; empty if ``CUDA_VISIBLE_DEVICES`` determines them.
        dynamo: the ``dynamo_backend`` that accelerate passes to the processes; ``no`` if it compiles nothing.
        on_cpu: whether accelerate is told to use the CPU, as its launcher tells a single process.
    """

    processes: int = 1
    sets_processes: bool = False
    machines: int = 1
    file: str = ""
    engine: str = "NO"
    ignored_processes: int = 0
    precision: str = "no"
    precision_by_option: bool = False
    refused: str = ""
    gpu_ids: str = ""
    dynamo: str = NOT_COMPILED
    on_cpu: bool = False


@dataclass(frozen=True)
class ReadCommand:
    """A command as read by TRL's own parser.

    Attributes:
        configurations: by the name of the class; empty if the parser refused the command.
        faults: every key that is unknown or has a value of a wrong type.
        overrides: fields whose values TRL's classes changed.
        launch: keys and values that ``trl`` passes to ``accelerate launch``.
        launched: the launch by accelerate; None with another launcher, or if the parser refused the command.
        names: every key that the classes and ``accelerate launch`` accept.
        refused: the error of the parser or of a class; empty without one.
        warnings: warnings of the classes.
        absent: by argument, the packages it needs that are not installed.
        ended: by argument that ends a training of a tiny model, the error.
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
    ended: Mapping[str, str] = field(default_factory=dict)

    @property
    def script(self) -> Mapping[str, object]:
        """The values of the arguments of TRL's script; empty without one."""
        return next((item.values for name, item in self.configurations.items() if name.endswith(SCRIPT_ARGUMENTS)), {})
