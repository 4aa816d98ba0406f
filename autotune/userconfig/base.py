"""Reads the user's own configuration that a search starts from, with TRL's parser."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from autotune.core.configuration import MODEL_CONFIG, Configuration, ReadCommand
from autotune.core.machine import Hardware
from autotune.core.nested import Key, at
from autotune.core.plan import TrainingPlan
from autotune.core.verdict import Finding, Severity, fatal
from autotune.errors import InputError, UnreadError
from autotune.inspection.yaml_file import YamlFile
from autotune.probing import JobServer
from autotune.techniques.base import Technique
from autotune.trainers import find_trainer
from autotune.userconfig.engine import without_engine
from autotune.userconfig.keys import engine_key, keys_of, of_engine
from autotune.userconfig.launch import Launching, launching
from autotune.userconfig.probed_engine import with_engine
from autotune.userconfig.problems import problems
from autotune.userconfig.reading import plan_of, read_command
from autotune.userconfig.rewards import named_rewards
from autotune.userconfig.sources import Sources, sources
from autotune.userconfig.written import Written

_INSTEAD = "Give MODEL and DATASET in addition to --base."


@dataclass(frozen=True)
class UserBase:
    """A configuration of the user's own, as TRL's parser reads it.

    Attributes:
        config: the values of the trainer's class.
        plan: its training plan, with every field that matters to a step, those at their defaults included.
        launching: the launch of its processes.
        assumptions: assumptions where the file does not determine a value, in sentences.
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
        """Defaults of TRL's classes for keys that are not in the file."""
        return {name: value for item in self.read.configurations.values() for name, value in item.defaults.items()}

    def keys(self, path: str) -> tuple[Key, ...]:
        """Return the keys in the file for the entry at a path of a plan; empty for an engine's entry."""
        return () if of_engine(path) else keys_of(self.file.values, path)

    def at(self, key: Key) -> tuple[object, ...]:
        """Return the value of a key as it is in the file, alone; nothing if it is not there."""
        return at(self.file.values, key)

    @property
    def arguments(self) -> Mapping[str, object]:
        """The keys of the file that belong to TRL's classes, as written; the others are for the launch."""
        return {name: value for name, value in self.file.values.items() if name in self.defaults}


def read_base(written: Written, hardware: Hardware, server: JobServer, folder: Path) -> UserBase:
    """Return a base as read by TRL's parser, for a device.

    Raises:
        InputError: keys of it are wrong, which the message names all at once; or it asks for what a probe does not do.
    """
    there = on_device(written, hardware)
    return base_from(there, read_command(there, hardware, server, folder))


def on_device(written: Written, hardware: Hardware) -> Written:
    """Return a base as read for a device: on a CPU, TRL refuses most files unless they set ``use_cpu``."""
    args = find_trainer(written.trainer).cpu_args if hardware.kind == "cpu" else {}
    added = [word for name, value in args.items() if name not in written.values for word in (f"--{name}", str(value))]
    command = written.command
    return replace(written, command=replace(command, words=(*command.words, *added)))


def base_from(written: Written, read: ReadCommand) -> UserBase:
    """Return a base from its command as read by TRL's parser.

    Raises:
        InputError: as in :func:`read_base`.
    """
    found, trainer = problems(written, read), find_trainer(written.trainer)
    config = read.configurations.get(trainer.config_class)
    if fatal(found):
        raise _wrong(written, found)
    started = launching(written, read)
    assert config is not None
    try:
        user = plan_of(written, read, without_engine(config))
    except UnreadError as error:
        raise InputError(f"{written.place}: {error.message}", hint="Leave it out of the base.") from error
    plan = with_engine(user.plan, started, config, written.place)
    return UserBase(written, read, config, plan, started, user.assumptions)


def sources_of(base: UserBase, model: str | Path | None, dataset: str | Path | None) -> Sources:
    """Return the model and the rows of a base, or those given instead.

    Raises:
        InputError: there is none, or it cannot be used.
    """
    try:
        found = sources(base.read, base.config, model, dataset)
    except UnreadError as error:
        raise InputError(f"{base.name}: {error.message}", hint=_INSTEAD) from error
    if found.dataset.mixture or found.streams:
        what = "Streamed rows are" if found.streams else f"A mixture of datasets ({found.dataset.name}) is"
        raise InputError(f"{base.name}: {what} not searched for.", hint=_INSTEAD)
    return found


def rewards_of(base: UserBase) -> tuple[str, ...]:
    """Return the reward functions of a base.

    Raises:
        InputError: it names a reward model.
    """
    if not find_trainer(base.written.trainer).scores:
        return ()
    try:
        return named_rewards(base.read)
    except UnreadError as error:
        hint = "Give reward functions that cost as much, with --reward-funcs, and leave it out of the base."
        raise InputError(f"{base.name}: {error.message}", hint=hint) from error


def _wrong(written: Written, found: Iterable[Finding]) -> InputError:
    lines = [_line(item) for item in found if item.severity is Severity.ERROR]
    things = "1 thing is wrong" if len(lines) == 1 else f"{len(lines)} things are wrong"
    return InputError(
        "\n  ".join([f"{written.place} cannot be a base: {things}.", *lines]),
        hint=f"`autotune check {written.place} --no-fit` has the details; with --fix-legacy it rewrites old keys.",
    )


def _line(item: Finding) -> str:
    return item.message if item.line is None else f"line {item.line}: {item.message}"


def written_keys(base: UserBase, technique: Technique) -> Mapping[str, object]:
    """Return the keys of the file that a technique writes, with their values."""
    keys = [key for path in sorted(technique.writes) for key in base.keys(path)]
    found = {key[-1]: value for key in dict.fromkeys(keys) for value in base.at(key)}
    return found | {
        engine_key(path): value
        for path in sorted(technique.identified_by or technique.writes)
        if of_engine(path) and (value := base.plan.entry(path)) is not None
    }
