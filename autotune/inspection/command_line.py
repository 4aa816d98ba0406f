"""Reads the command of a training that is about to run: which trainer, which file, which arguments. It runs nothing."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path, PurePath

from autotune.errors import InputError
from autotune.trainers import REMOVED, find_trainer, trainers

CONFIG = "--config"
TRL_PARSER = "TrlParser"
"""TRL's parser, which reads a file as well."""
# That, and the parser of transformers that it extends.
_PARSERS = (TRL_PARSER, "HfArgumentParser")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_OPTION = re.compile(r"--|-\D")
_PYTHON = re.compile(r"python(\d(\.\d+)?)?")
TRL, TORCHRUN, DEEPSPEED, ACCELERATE = "trl", "torchrun", "deepspeed", "accelerate"
"""The programs that start the processes of a script; of these, ``trl`` starts its own by accelerate."""
_LAUNCHERS = frozenset({TRL, ACCELERATE, TORCHRUN, DEEPSPEED})
# The same programs as modules, after `python -m`.
_MODULES = {
    "torch.distributed.run": TORCHRUN,
    "torch.distributed.launch": TORCHRUN,
    "deepspeed.launcher.runner": DEEPSPEED,
    "accelerate.commands.launch": ACCELERATE,
}
_WITHOUT_TRAINING = frozenset({"env", "vllm-serve"})
_TRL_SCRIPTS = "trl/scripts"
# A script is read to find the classes that it uses; longer ones are not.
_MOST_SCRIPT_BYTES = 1 << 20
_HINT = "Give `trl NAME --config FILE`, or `accelerate launch … SCRIPT.py --config FILE`."


@dataclass(frozen=True)
class Command:
    """A command that trains.

    Attributes:
        trainer: name of the trainer, or None if the command does not determine it.
        words: the words that TRL's parser reads: ``--config FILE`` and further arguments.
        launch: the words of the launcher before the script.
        env: variables that are set before the command.
        script: the user's own script, or None for TRL's.
        parser: the class that reads the words; empty if the script reads them by itself.
        launcher: the program that starts the processes; empty where it is ``python``.
    """

    trainer: str | None
    words: tuple[str, ...]
    launch: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    script: str | None = None
    parser: str = TRL_PARSER
    launcher: str = ""

    @property
    def config(self) -> Path | None:
        """The file that ``--config`` names."""
        named, _ = split_config(self.words)
        return Path(named) if named is not None else None


def split_config(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the file that the first ``--config`` of words names, and the words without both."""
    for index, word in enumerate(words):
        if word == CONFIG and words[index + 1 : index + 2]:
            return words[index + 1], [*words[:index], *words[index + 2 :]]
        if word.startswith(f"{CONFIG}="):
            return word.partition("=")[2], [*words[:index], *words[index + 1 :]]
    return None, list(words)


def options_of(words: Sequence[str]) -> dict[str, object]:
    """Return the options among words with their values: True for a switch, a list where an option has several."""
    found: dict[str, list[str]] = {}
    values: list[str] = []
    for word in words:
        if _OPTION.match(word):
            name, equals, value = word.partition("=")
            values = []
            if word.startswith("--"):
                found[name[2:].replace("-", "_")] = [value] if equals else values
        else:
            values.append(word)
    return {name: several if several[1:] else next(iter(several), True) for name, several in found.items()}


def read_command_line(words: Sequence[str]) -> Command:
    """Return the parsed command.

    Raises:
        InputError: it starts no training that is known.
    """
    refused = InputError(f"{' '.join(words) or 'Nothing'} is no command that trains with TRL.", hint=_HINT)
    # The name of a program may also be the value of an option of what starts it, as in `uv run --with trl trl dpo`.
    errors = []
    for start in (index for index, word in enumerate(words) if launches(word)):
        try:
            return _from(words, start)
        except InputError as error:
            errors.append(error)
    raise errors[0] if errors else refused


def launches(word: str) -> bool:
    """Return whether a word of a command is a program that starts trainings, or Python."""
    name = PurePath(word).name
    return name in _LAUNCHERS or _PYTHON.fullmatch(name) is not None


def _from(words: Sequence[str], start: int) -> Command:
    """Return the command whose program is the word at a place."""
    assigned = (word.partition("=") for word in words[:start] if _ASSIGNMENT.fullmatch(word))
    env = {name: value for name, _, value in assigned}
    name, rest = PurePath(words[start]).name, tuple(words[start + 1 :])
    if _PYTHON.fullmatch(name) and rest[:1] == ("-m",) and len(rest) > 1 and rest[1] in _LAUNCHERS:
        name, rest = rest[1], rest[2:]
    if name == TRL:
        return _of_trl(rest, env)
    if name == ACCELERATE:
        if rest[:1] != ("launch",):
            raise InputError(f"`accelerate {' '.join(rest[:1])}` starts no training.", hint=_HINT)
        rest = rest[1:]
    return _of_script(rest, env, name)


def _of_trl(words: Sequence[str], env: Mapping[str, str]) -> Command:
    name = words[0] if words else ""
    if name in _WITHOUT_TRAINING or not name:
        raise InputError(f"`trl {name}` trains nothing.".replace(" `", "`"), hint=_HINT)
    known = trainers().get(name)
    if known is None and name not in REMOVED:
        named = ", ".join(item.name for item in trainers().values() if item.has_command)
        raise InputError(f"autotune does not know `trl {name}`.", hint=f"It knows {named}.")
    if not find_trainer(name).has_command:
        raise InputError(f"TRL has no command `trl {name}`.", hint="Give the command that starts its script.")
    return Command(name, tuple(words[1:]), env=env, launcher=TRL)


def _of_script(words: Sequence[str], env: Mapping[str, str], program: str) -> Command:
    place = next((index for index, word in enumerate(words) if word.endswith(".py")), None)
    if place is None:
        raise InputError(f"There is no script in {' '.join(words) or 'the command'}.", hint=_HINT)
    script, launch, own = words[place], tuple(words[:place]), tuple(words[place + 1 :])
    launcher = program if program in _LAUNCHERS else _module(launch)
    if launcher != program and launcher:
        launch = launch[launch.index("-m") + 2 :]
    if _TRL_SCRIPTS in PurePath(script).as_posix() and PurePath(script).stem in trainers():
        return Command(PurePath(script).stem, own, launch, env, launcher=launcher)
    names = _names_in(Path(script))
    used = [item.name for item in trainers().values() if {item.config_class, item.trainer_class} & names]
    trainer = used[0] if len(used) == 1 else None
    # A script that gets a file by itself, as in `train.py config.json`, does not leave it to a parser of options.
    by_itself = own and not _OPTION.match(own[0])
    parser = "" if by_itself else next((name for name in _PARSERS if name in names), "")
    return Command(trainer, own, launch, env, script, parser, launcher)


def _module(words: Sequence[str]) -> str:
    """Return the launcher that ``python -m`` starts; empty if none."""
    named = (following for word, following in pairwise(words) if word == "-m")
    return _MODULES.get(next(named, ""), "")


def _names_in(script: Path) -> frozenset[str]:
    """Return the names that a script uses. It is parsed, and not run.

    Raises:
        InputError: it cannot be read, or is no Python.
    """
    try:
        if script.stat().st_size > _MOST_SCRIPT_BYTES:
            raise InputError(f"{script} is too long to be read.", hint="Give its configuration file instead.")
        tree = ast.parse(script.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"The script {script} cannot be read: {error.strerror}.") from error
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"The script {script} is not Python: {error}.") from error
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    imported = (alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names)
    return frozenset(names | set(imported))
