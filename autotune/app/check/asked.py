"""What a check is asked for, and which command, file and trainer it is about; nothing heavy is needed for that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from autotune.app.check.beside import trainer_in
from autotune.confidential import hidden_values, hidden_words
from autotune.errors import InputError
from autotune.inspection.command_line import CONFIG, Command, of_file, read_command_line
from autotune.inspection.yaml_file import YamlFile, read_yaml
from autotune.inspection.yaml_secrets import withheld
from autotune.trainers import find_trainer, trainers
from autotune.units import parse_duration

Unsure = Literal["pass", "fail"]
_REMEDY = "Name it with --trainer."


@dataclass(frozen=True)
class Asked:
    """A check, as it was asked for.

    Attributes:
        config: a YAML file of TRL's, or None for a command.
        command: the words of a command; empty for a file.
        trainer, model, dataset: in place of what the configuration says; None: as it says.
        gpu: the GPU to check for, as for ``autotune plan``; None: this machine's.
        memory_budget: memory that the training may need; None: all of the device.
        probe: whether its worst micro-batches are run on this machine's device.
        timeout: time after which that run is ended, such as ``10m`` or in seconds; None: none.
        imports: whether the modules of the user's reward functions are imported, in processes of their own.
        fits: whether to say if it fits; if not, it is only read.
        when_unsure: what an answer that is too close to call, or unknown, counts as; None: neither.
    """

    config: str | None = None
    command: tuple[str, ...] = ()
    trainer: str | None = None
    model: str | None = None
    dataset: str | None = None
    gpu: str | None = None
    memory_budget: str | int | None = None
    probe: bool = False
    timeout: str | float | None = None
    imports: bool = False
    fits: bool = True
    when_unsure: Unsure | None = None

    @property
    def passes(self) -> bool | None:
        """What an answer that is too close to call, or unknown, counts as; None: neither."""
        return None if self.when_unsure is None else self.when_unsure == "pass"

    @property
    def timeout_seconds(self) -> float | None:
        """Time after which a real run is ended.

        Raises:
            InputError: it is no duration.
        """
        return parse_duration(self.timeout) if isinstance(self.timeout, str) else self.timeout

    @property
    def settings(self) -> dict[str, object]:
        """The options, for the document of the verdict."""
        given = {name: value for name, value in vars(self).items() if value not in (None, (), False)}
        words = {"command": hidden_words(self.command)} if self.command else {}
        return {**hidden_values(given), **words}


@dataclass(frozen=True)
class Written:
    """The command that is checked, with the file that it names, both without what is secret.

    TRL's parser reads the file itself, and nothing else needs it: neither a step nor a verdict depends on a secret.

    Attributes:
        file: None where the command names none.
        trainer: the trainer's name.
    """

    command: Command
    file: YamlFile | None
    trainer: str

    @property
    def values(self) -> Mapping[str, object]:
        """The keys of the file."""
        return self.file.values if self.file is not None else {}

    def line(self, key: str) -> int | None:
        """Return the line of a key in the file, or None if it is not there."""
        return self.file.line(key) if self.file is not None else None

    @property
    def place(self) -> str:
        """The file's name, as the user wrote it, or empty."""
        return str(self.file.path) if self.file is not None else ""


def check_options(asked: Asked) -> None:
    """Check that the options of a check go together.

    Raises:
        InputError: two of them do not, or one cannot be used.
    """
    if asked.probe and asked.gpu is not None:
        raise InputError("--probe runs on this machine's device.", hint="Leave out --gpu.")
    if asked.timeout is not None and not asked.probe:
        raise InputError("--timeout ends the run of --probe, and there is none.", hint="Give both, or neither.")
    if asked.imports and not asked.fits:
        raise InputError("--import is for building the trainer, which --no-fit leaves out.", hint="Give one of them.")
    seconds = asked.timeout_seconds
    if seconds is not None and seconds <= 0:
        raise InputError(f"A time-out of {seconds:g} seconds is not possible.", hint="It is above 0.")


def written(asked: Asked) -> Written:
    """Return the command and the file of a check.

    Raises:
        InputError: they cannot be read, or do not tell the trainer.
    """
    if (asked.config is None) == (not asked.command):
        what = "neither a file nor a command" if asked.config is None else "both a file and a command"
        raise InputError(f"There is {what} to check.", hint="Give CONFIG.yaml, or -- and the command.")
    words = hidden_words(asked.command)
    command = read_command_line(words) if asked.config is None else of_file(asked.config, asked.trainer)
    file = withheld(read_yaml(command.config)) if command.config is not None else None
    if asked.trainer is not None:
        name = find_trainer(asked.trainer).name
        if command.trainer is not None and command.trainer != name:
            raise InputError(f"The command trains with {command.trainer}, and --trainer says {name}.")
    else:
        name = command.trainer or _trainer_of(file)
    if command.script is not None and not command.uses_parser and file is None:
        raise InputError(
            f"{command.script} reads its arguments by itself, so they cannot be known.",
            hint=f"Check the configuration that it trains by, or use TrlParser and {CONFIG} FILE in it; or"
            " `autotune dry-run` runs the script itself, on null GPUs.",
        )
    return Written(command, file, name)


def _trainer_of(file: YamlFile | None) -> str:
    """Return the only trainer that has all of a file's keys that belong to some trainer; of several, a bundle's.

    Raises:
        InputError: there is not exactly one.
    """
    if file is None:
        raise InputError("The command does not say which trainer it is for.", hint=_REMEDY)
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
        raise InputError(f"No key of {file.path} says which trainer it is for.", hint=_REMEDY)
    if having:
        raise InputError(f"{file.path} may be for {', '.join(having)}.", hint=_REMEDY)
    counts = {item.name: len(own & item.fields) for item in known}
    best = max(counts, key=lambda name: counts[name])
    raise InputError(f"No trainer has all the keys of {file.path}; {best} has the most of them.", hint=_REMEDY)
