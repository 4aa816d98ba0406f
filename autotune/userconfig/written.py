"""Reads a user's command and configuration file, and determines the trainer, without heavy imports."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.confidential import hidden_words
from autotune.core.files.nested import mapping
from autotune.errors import InputError, UnreadError
from autotune.inspection.command_line import CONFIG, TRL, Command, options_of, read_command_line
from autotune.inspection.paths import user_path
from autotune.inspection.script import TRL_PARSER
from autotune.inspection.yaml_file import YamlFile, read_yaml
from autotune.inspection.yaml_secrets import mask_secrets
from autotune.trainers import find_trainer, trainers
from autotune.userconfig.bundle import trainer_in

_REMEDY = "Name it with --trainer."
# Keys that only files of accelerate have.
_OF_ACCELERATE = frozenset({"compute_environment", "distributed_type"})


@dataclass(frozen=True)
class WrittenConfig:
    """A user's command and its configuration file, with secrets masked.

    A child process reads the file itself by TRL's parser; no step depends on a secret.

    Attributes:
        command: the parsed command; of a file alone, ``trl --config FILE``.
        file: the file of ``--config``, or None.
        trainer: the trainer's name.
        default: accelerate's default configuration file, or None.
    """

    command: Command
    file: YamlFile | None
    trainer: str
    default: Path | None = None

    @property
    def values(self) -> Mapping[str, object]:
        """The keys of the file."""
        return self.file.values if self.file is not None else {}

    @property
    def given(self) -> Mapping[str, object]:
        """The keys of the file and the options of the command, with their values; options override keys."""
        return {**self.values, **{name: _typed(value) for name, value in options_of(self.command.words).items()}}

    @property
    def env(self) -> Mapping[str, str]:
        """The environment variables that the file sets."""
        return {str(name): str(value) for name, value in mapping(self.values.get("env")).items()}

    @property
    def own_command(self) -> str:
        """TRL's own command, such as ``trl grpo``, if its script trains; else empty."""
        own = self.command.words and self.command.script is None and find_trainer(self.trainer).has_command
        return f"trl {self.trainer}" if own else ""

    def may_be_own(self, key: str) -> bool:
        """Return whether a key may belong to the user's own script, which accepts more than TRL's and mentions it."""
        source = self.command.source
        return source is not None and source.takes_more and key in source.names

    def line(self, key: str) -> int | None:
        """Return the line of a key in the file, or None."""
        return self.file.line(key) if self.file is not None else None

    @property
    def place(self) -> str:
        """The file's name, as the user wrote it, or empty."""
        return str(self.file.path) if self.file is not None else ""


def read_written(config: str | None, trainer: str | None = None, command: Sequence[str] = ()) -> WrittenConfig:
    """Return a user's command and its configuration file.

    Args:
        config: a TRL configuration file, or None for a command.
        trainer: the trainer's name; None: that of the command or the file.
        command: the words of a command; empty for a file.

    Raises:
        InputError: they cannot be read, or do not determine the trainer.
        UnreadError: the command may train, but autotune cannot determine its configuration.
    """
    if config is None and not command:
        hint = "Give CONFIG.yaml, or -- and the command."
        raise InputError("There is neither a file nor a command to check.", hint=hint)
    if config is None:
        found = read_command_line(hidden_words(command))
    else:
        found = Command(trainer, (CONFIG, str(user_path(config))), launcher=TRL)
    if found.parser == TRL_PARSER:
        _check_for_parser(found)
    named = find_trainer(trainer).name if trainer is not None else None
    trained = found.trainer or (found.source.unsupported if found.source is not None else None)
    if named is not None and trained and trained != named:
        raise InputError(f"The command trains with {trained}, but --trainer is {named}.", hint="Leave out --trainer.")
    if trained and found.trainer is None:
        raise UnreadError(f"{found.script} trains with {trained}, which autotune does not support.")
    file = mask_secrets(read_yaml(found.config)) if found.config is not None else None
    if file is not None and found.parser == TRL_PARSER and not _OF_ACCELERATE.isdisjoint(file.values):
        raise InputError(
            f"{file.path} is a file of accelerate.",
            hint="Name it with accelerate_config in TRL's file, or by `accelerate launch --config_file`.",
        )
    if found.script is not None and not found.parser and file is None:
        raise UnreadError(
            f"{found.script} parses its arguments itself, so autotune cannot read them.",
            hint=f"Check the configuration file that it uses, or parse its arguments with TrlParser and {CONFIG} FILE.",
        )
    return WrittenConfig(found, file, named or found.trainer or _trainer_of(file))


def _check_for_parser(command: Command) -> None:
    """Check that TRL's parser accepts the way in which a command names its file.

    Raises:
        InputError: it does not.
    """
    if any(word.startswith(f"{CONFIG}=") for word in command.words):
        raise InputError(
            f"TRL reads `{CONFIG} FILE`, in two words.", hint=f"Write a space instead of the = of {CONFIG}=."
        )
    if command.source is not None and command.stray:
        raise InputError(f"TrlParser only accepts a file by {CONFIG}.", hint=f"Write {CONFIG} {command.stray}.")


def _typed(word: object) -> object:
    """Return a word of the command line parsed as JSON, such as a number, or the word itself."""
    try:
        return json.loads(str(word))
    except ValueError:
        return word


def _trainer_of(file: YamlFile | None) -> str:
    """Return the only trainer that has all trainer keys of a file; of several, the trainer of the file's bundle.

    Raises:
        InputError: there is not exactly one.
        UnreadError: there is no file.
    """
    if file is None:
        raise UnreadError("The command names no trainer.", hint=_REMEDY)
    known = trainers().values()
    every = frozenset().union(*(item.fields for item in known))
    own = every & file.values.keys()
    having = [item.name for item in known if own <= item.fields]
    if len(having) == 1:
        return having[0]
    handed_over = trainer_in(file.path.parent)
    if handed_over in having:
        return handed_over
    if not own or len(having) == len(known):
        raise InputError(f"No key of {file.path} belongs to a single trainer.", hint=_REMEDY)
    if having:
        raise InputError(f"{file.path} may be for {', '.join(having)}.", hint=_REMEDY)
    counts = {item.name: len(own & item.fields) for item in known}
    best = max(counts, key=lambda name: counts[name])
    raise InputError(f"No trainer has all the keys of {file.path}; {best} has the most of them.", hint=_REMEDY)
