"""Parses a training command, such as ``accelerate launch train.py --config c.yaml``, without running anything."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise, takewhile
from pathlib import Path, PurePath

from autotune.errors import InputError, UnreadError
from autotune.inspection.paths import is_file
from autotune.inspection.script import TRL_PARSER, Script, read_script
from autotune.trainers import REMOVED, find_trainer, trainers

CONFIG = "--config"
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
"""A variable assignment before a command, for a shell or ``env``."""
PYTHON = re.compile(r"python(\d(\.\d+)?)?")
"""Names of the program Python."""
_OPTION = re.compile(r"--|-\D")
_SHELLS = frozenset({"bash", "sh", "dash", "zsh"})
# A shell's option -c, alone or combined with other flags: its value is a command as text.
_SHELL_COMMAND_OPTION = re.compile(r"-[A-Za-z]*c")
_SEPARATORS = ";&|()\n"
_REDIRECTION = re.compile(r"\d*[<>]")
TRL, TORCHRUN, DEEPSPEED, ACCELERATE = "trl", "torchrun", "deepspeed", "accelerate"
"""The programs that launch the processes of a script; ``trl`` does so through accelerate."""
_LAUNCHERS = frozenset({TRL, ACCELERATE, TORCHRUN, DEEPSPEED})
# Other names of the same programs: modules for `python -m`, and a program with a command.
_ALIASES = {
    "accelerate-launch": (ACCELERATE, "launch"),
    "trl.cli.main": (TRL,),
    "torch.distributed.run": (TORCHRUN,),
    "torch.distributed.launch": (TORCHRUN,),
    "deepspeed.launcher.runner": (DEEPSPEED,),
    "accelerate.commands.accelerate_cli": (ACCELERATE,),
    "accelerate.commands.launch": (ACCELERATE, "launch"),
}
# Packages of these programs that Python does not run.
_WITHOUT_MAIN = frozenset({*_LAUNCHERS, "trl.cli"})
# Options that name a module instead of a script; launchers have them as flags.
_MODULE_OPTIONS = frozenset({"-m", "--module"})
_COMMANDS_WITHOUT_TRAINING = frozenset({"env", "vllm-serve"})
_TRL_SCRIPTS = "trl/scripts"
_HINT = "Give `trl NAME --config FILE`, or `accelerate launch … SCRIPT.py --config FILE`."


@dataclass(frozen=True)
class Command:
    """A parsed training command.

    Attributes:
        trainer: name of the trainer, or None if the command does not determine it.
        words: the script's arguments, which TRL's parser reads, such as ``--config FILE``.
        launch: the launcher's arguments before the script.
        env: variables that are set before the command.
        source: the user's own script, or None for TRL's.
        launcher: the program that launches the processes; empty for ``python``.
    """

    trainer: str | None
    words: tuple[str, ...]
    launch: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    source: Script | None = None
    launcher: str = ""

    @property
    def config(self) -> Path | None:
        """The file that ``--config`` names."""
        named, _ = split_config(self.words)
        return Path(named) if named is not None else None

    @property
    def script(self) -> str | None:
        """The path of the user's own script, or None for TRL's."""
        return self.source.path if self.source is not None else None

    @property
    def stray(self) -> str:
        """The script's first argument if it is positional, such as the file in ``train.py config.json``; else empty."""
        return self.words[0] if self.words and not _OPTION.match(self.words[0]) else ""

    @property
    def parser(self) -> str:
        """The class that parses the arguments; empty if the script does so itself."""
        if self.source is None:
            return TRL_PARSER
        # TRL's parser accepts no positional argument; a script with transformers' parser may read it.
        by_itself = self.stray and (self.source.parser != TRL_PARSER or self.source.reads_words)
        return "" if by_itself else self.source.parser

    @property
    def takes_more(self) -> bool:
        """Whether the script may accept keys that TRL does not have."""
        return self.source is not None and self.source.takes_more


def split_config(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the value of the first ``--config`` among arguments, and the other arguments."""
    for index, word in enumerate(words):
        if word == CONFIG and words[index + 1 : index + 2]:
            return words[index + 1], [*words[:index], *words[index + 2 :]]
        if word.startswith(f"{CONFIG}="):
            return word.partition("=")[2], [*words[:index], *words[index + 1 :]]
    return None, list(words)


def options_of(words: Sequence[str]) -> dict[str, object]:
    """Return the options among arguments with their values: True for a switch, a list for several values."""
    options: dict[str, list[str]] = {}
    values: list[str] = []
    for word in words:
        if _OPTION.match(word):
            name, equals, value = word.partition("=")
            values = []
            if word.startswith("--"):
                options[name[2:].replace("-", "_")] = [value] if equals else values
        else:
            values.append(word)
    return {name: several if several[1:] else next(iter(several), True) for name, several in options.items()}


def read_command_line(words: Sequence[str], *, anywhere: bool = False) -> Command:
    """Return the parsed command.

    Args:
        anywhere: whether it may run in another directory, whose files are not read.

    Raises:
        InputError: it starts no known training.
        UnreadError: it starts a module that is not on this machine, or a training in another directory.
    """
    refused = InputError(f"{' '.join(words) or 'An empty text'} is not a command that trains with TRL.", hint=_HINT)
    errors = []
    for folder, part in _commands(words):
        # The name of a program may also be the value of a wrapper's option: `uv run --with trl trl dpo`. A module is
        # read with the program before it.
        before = ("", *part)
        for start in (i for i, word in enumerate(part) if launches(word) and before[i] not in _MODULE_OPTIONS):
            try:
                if not anywhere:
                    _check_folder(folder)
                assigned = (word.partition("=") for word in part[:start] if ASSIGNMENT.fullmatch(word))
                return _parse_program(part[start:], {name: value for name, _, value in assigned})
            except InputError as error:
                errors.append(error)
    raise errors[0] if errors else refused


def _check_folder(folder: Path) -> None:
    """Check that a command runs in the working directory, where a check looks for its files.

    Raises:
        UnreadError: it does not.
    """
    if folder.resolve() != Path.cwd():
        raise UnreadError(
            f"The command first changes to the directory {folder}, where its files are.",
            hint="Run autotune there, and leave out the cd.",
        )


def _commands(words: Sequence[str], folder: Path = Path()) -> Iterator[tuple[Path, Sequence[str]]]:
    """Yield the commands in the text of a shell's ``-c``, or else the words themselves, each with its directory.

    Raises:
        InputError: the text has an unclosed quotation mark.
    """
    for place in (index for index, word in enumerate(words) if PurePath(word).name in _SHELLS):
        options = list(takewhile(_OPTION.match, words[place + 1 :]))
        text = words[place + 1 + len(options) :][:1]
        if text and any(_SHELL_COMMAND_OPTION.fullmatch(option) for option in options):
            assigned = [word for word in words[:place] if ASSIGNMENT.fullmatch(word)]
            for part in _split_shell_text(text[0]):
                if part[0] == "export":
                    assigned += part[1:]
                if part[0] == "cd":
                    folder /= part[-1] if part[1:] else "~"
                else:
                    yield from _commands([*assigned, *part], folder)
            return
    yield folder, words


def _split_shell_text(text: str) -> Iterator[list[str]]:
    """Yield the words of each command in a text for a shell, without redirections.

    Raises:
        InputError: the text has an unclosed quotation mark.
    """
    lexer = shlex.shlex(text.replace("\\\n", " "), posix=True, punctuation_chars=_SEPARATORS)
    lexer.whitespace_split, lexer.commenters, lexer.whitespace = True, "", " \t\r"
    try:
        tokens = list(lexer)
    except ValueError as error:
        raise InputError(f"The text for the shell cannot be read: {error}.", hint=_HINT) from error
    for separates, part in groupby(tokens, key=_is_separator):
        command = list(takewhile(lambda word: not _REDIRECTION.match(word), part))
        if command and not separates:
            yield command


def _is_separator(token: str) -> bool:
    return bool(token) and not token.strip(_SEPARATORS)


def launches(word: str) -> bool:
    """Return whether a word of a command is a launcher or Python."""
    name = PurePath(word).name
    return name in _LAUNCHERS or name in _ALIASES or PYTHON.fullmatch(name) is not None


def _parse_program(words: Sequence[str], env: Mapping[str, str]) -> Command:
    """Return the command of words that begin with a launcher or Python."""
    name, rest = PurePath(words[0]).name, tuple(words[1:])
    if name in _ALIASES:
        return _parse_program([*_ALIASES[name], *rest], env)
    if name == TRL:
        return _parse_trl(rest, env)
    if name == ACCELERATE:
        if rest[:1] != ("launch",):
            raise InputError(f"`accelerate {' '.join(rest[:1])}` starts no training.", hint=_HINT)
        rest = rest[1:]
    return _parse_script(rest, env, name if name in _LAUNCHERS else "")


def _parse_trl(words: Sequence[str], env: Mapping[str, str]) -> Command:
    name = words[0] if words else ""
    if name in _COMMANDS_WITHOUT_TRAINING or not name:
        raise InputError(f"`trl {name}` trains nothing.".replace(" `", "`"), hint=_HINT)
    known = trainers().get(name)
    if known is None and name not in REMOVED:
        named = ", ".join(item.name for item in trainers().values() if item.has_command)
        raise InputError(f"autotune does not support `trl {name}`.", hint=f"It supports {named}.")
    if not find_trainer(name).has_command:
        raise InputError(f"TRL has no command `trl {name}`.", hint="Give the command that starts its script.")
    return Command(name, tuple(words[1:]), env=env, launcher=TRL)


def _parse_script(words: Sequence[str], env: Mapping[str, str], launcher: str) -> Command:
    """Return the command of a script or a module.

    Args:
        words: after the program.
        launcher: the program; empty for ``python``.
    """
    end = next((i for i, word in enumerate(words) if word.endswith(".py") or word in _MODULE_OPTIONS), len(words))
    launch, (script, *own) = tuple(words[:end]), words[end:] or [""]
    if not script or not _are_options(launch, launcher):
        raise InputError(f"There is no script in {' '.join(words) or 'the command'}.", hint=_HINT)
    if script in _MODULE_OPTIONS:
        module, *own = own or [""]
        if not launcher and module in _ALIASES:
            return _parse_program([module, *own], env)
        launch, script = (*launch, script), _module_file(module)
    if _TRL_SCRIPTS in PurePath(script).as_posix() and PurePath(script).stem in trainers():
        return Command(PurePath(script).stem, tuple(own), launch, env, launcher=launcher)
    source = read_script(script)
    return Command(source.trainer, tuple(own), launch, env, source, launcher)


def _are_options(words: Sequence[str], launcher: str) -> bool:
    """Return whether words before a script may be options of its launcher, with at most one value each.

    If not, the launcher's name is the value of a wrapper's option: ``srun --job-name python torchrun …``.
    """
    several = any(not _OPTION.match(before) and not _OPTION.match(word) for before, word in pairwise(("", *words)))
    return not several and (bool(launcher) or not any(word.startswith("--") for word in words))


def _module_file(module: str) -> str:
    """Return the path of a module's file, relative to the working directory.

    Raises:
        InputError: it is a launcher's package, which Python does not run.
        UnreadError: there is no such file, and the module is not one of TRL's scripts.
    """
    path = module.replace(".", "/")
    files = [f"{path}.py", f"{path}/__main__.py"]
    found = next((file for file in files if path.startswith(_TRL_SCRIPTS) or is_file(Path(file))), None)
    if found is None and module in _WITHOUT_MAIN:
        program = module.partition(".")[0]
        raise InputError(f"Python cannot run {module} as a module.", hint=f"Write {program} in place of -m {module}.")
    if found is None:
        raise UnreadError(f"There is no {files[0]} here, so the module {module or 'of -m'} cannot be read.")
    return found
