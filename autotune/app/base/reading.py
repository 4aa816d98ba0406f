"""Reads the configuration of the user's own that a search starts from, with TRL's own parser."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from autotune.app.base.engine import with_engine
from autotune.app.check.asked import Asked as CheckAsked
from autotune.app.check.asked import Written
from autotune.app.check.asked import written as written_by
from autotune.app.check.engine import without_engine
from autotune.app.check.keys import keys_of, of_engine
from autotune.app.check.launch import Launching, launching
from autotune.app.check.problems import problems
from autotune.app.check.reading import plan_of, read
from autotune.app.check.sources import Sources, sources
from autotune.app.check.task import UnreadError, fatal
from autotune.app.options import Options
from autotune.core.configuration import MODEL_CONFIG, Configuration, ReadCommand
from autotune.core.machine import Hardware
from autotune.core.nested import Key, at
from autotune.core.plan import TrainingPlan
from autotune.core.verdict import Finding, Severity
from autotune.errors import InputError
from autotune.inspection.yaml_file import YamlFile
from autotune.probing import JobServer
from autotune.trainers import find_trainer

_INSTEAD = "Give MODEL and DATASET beside --base."
_REWARD_MODEL = "reward_model_name_or_path"


@dataclass(frozen=True)
class UserBase:
    """A configuration of the user's own, as TRL's parser reads it.

    Attributes:
        config: the values of the trainer's class.
        plan: its training plan, with every field that matters to a step, those at their defaults included.
        launching: how its processes are started.
        assumptions: what was assumed where the file alone does not say, in sentences.
    """

    written: Written
    read: ReadCommand
    config: Configuration
    plan: TrainingPlan
    launching: Launching
    assumptions: tuple[str, ...] = ()

    @property
    def file(self) -> YamlFile:
        """The file."""
        assert self.written.file is not None
        return self.written.file

    @property
    def name(self) -> str:
        """The file, as the user named it."""
        return self.written.place

    @property
    def model(self) -> Configuration:
        """The values of ``trl.ModelConfig``."""
        return self.read.configurations[MODEL_CONFIG]

    @property
    def defaults(self) -> Mapping[str, object]:
        """What TRL's classes have for a key that is not in the file."""
        return {name: value for item in self.read.configurations.values() for name, value in item.defaults.items()}

    def keys(self, path: str) -> tuple[Key, ...]:
        """Return where in the file the entry at a path of a plan stands, or should; nothing for one of an engine."""
        return () if of_engine(path) else keys_of(self.file.values, path)

    def at(self, key: Key) -> tuple[object, ...]:
        """Return the value of a key as it is in the file, alone; nothing if it is not there."""
        return at(self.file.values, key)

    @property
    def arguments(self) -> Mapping[str, object]:
        """The keys of the file that belong to TRL's classes, as written; the others are for the launch."""
        return {name: value for name, value in self.file.values.items() if name in self.defaults}


def find_base(config: str, trainer: str | None) -> Written:
    """Return the file of a base with the trainer that it is for.

    Raises:
        InputError: it cannot be read, or does not tell the trainer.
    """
    return written_by(CheckAsked(config=config, trainer=trainer))


def read_base(written: Written, hardware: Hardware, server: JobServer, folder: Path) -> UserBase:
    """Return what TRL's parser makes of a base, for a device.

    Raises:
        InputError: keys of it are wrong, which the message names all at once; or it asks for what a probe does not do.
    """
    there = on_device(written, hardware)
    return understood(there, read(there, hardware, server, folder))


def on_device(written: Written, hardware: Hardware) -> Written:
    """Return a base as it is read for a device: TRL refuses most files on a CPU that do not say that it is meant."""
    args = find_trainer(written.trainer).cpu_args if hardware.kind == "cpu" else {}
    said = [word for name, value in args.items() if name not in written.values for word in (f"--{name}", str(value))]
    command = written.command
    return replace(written, command=replace(command, words=(*command.words, *said)))


def understood(written: Written, known: ReadCommand) -> UserBase:
    """Return a base of which TRL's parser has made something.

    Raises:
        InputError: as :func:`read_base` says.
    """
    found, trainer = problems(written, known), find_trainer(written.trainer)
    config = known.configurations.get(trainer.config_class)
    if config is None or fatal(found):
        raise _wrong(written, found)
    started = launching(written, known, config)
    try:
        user = plan_of(written, known, without_engine(config))
    except UnreadError as error:
        raise InputError(f"{written.place}: {error.message}", hint="Leave it out of the base.") from error
    plan = with_engine(user.plan, started, config, written.place)
    return UserBase(written, known, config, plan, started, user.assumptions)


def sources_of(base: UserBase, model: str | None, dataset: str | None) -> Sources:
    """Return the model and the rows of a base, or those given instead.

    Raises:
        InputError: there is none, or it cannot be used.
    """
    try:
        found = sources(CheckAsked(config=base.name, model=model, dataset=dataset), base.read, base.config)
    except UnreadError as error:
        raise InputError(f"{base.name}: {error.message}", hint=_INSTEAD) from error
    if found.dataset.mixture or found.streams:
        what = "Streamed rows are" if found.streams else f"A mixture of datasets ({found.dataset.name}) is"
        raise InputError(f"{base.name}: {what} not searched for.", hint=_INSTEAD)
    return found


def rewards_of(base: UserBase, options: Options) -> tuple[str, ...]:
    """Return the reward functions of a base.

    Raises:
        InputError: it names a reward model.
    """
    script = base.read.script
    if not options.trainer.generates:
        return ()
    if script.get(_REWARD_MODEL):
        raise InputError(
            f"{base.name} names a reward model ({_REWARD_MODEL}), which probes do not run.",
            hint="Give reward functions that cost as much, with --reward-funcs, and leave it out of the base.",
        )
    named = script.get("reward_funcs")
    return tuple(str(name) for name in named) if isinstance(named, list) else ()


def _wrong(written: Written, found: Iterable[Finding]) -> InputError:
    lines = [_line(item) for item in found if item.severity is Severity.ERROR]
    things = "1 thing is wrong" if len(lines) == 1 else f"{len(lines)} things are wrong"
    return InputError(
        "\n  ".join([f"{written.place} cannot be a base: {things}.", *lines]),
        hint=f"`autotune check {written.place} --no-fit` says more; with --fix-legacy it rewrites old keys.",
    )


def _line(item: Finding) -> str:
    return item.message if item.line is None else f"line {item.line}: {item.message}"
