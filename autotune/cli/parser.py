"""Builds the ``autotune`` argument parser from the commands' modules, and parses the command line."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from autotune import __version__
from autotune.cli.arguments import wrap_text
from autotune.cli.commands import check, dry_run, lengths, plan, probe, report, techniques
from autotune.errors import InputError, suggestion
from autotune.units import UNITS

_DESCRIPTION = (
    "Finds the TRL configuration that trains fastest on your data and fits your device, by running real training steps."
)
_EXAMPLES = """\
examples:
  autotune probe Qwen/Qwen2.5-0.5B data.jsonl --memory-budget 24GiB
  autotune plan Qwen/Qwen2.5-0.5B --seq-len 2048 --gpu RTX4090
  autotune check config.yaml --gpu H100-80GB
  autotune dry-run --gpu H100-80GB -- python train.py
  autotune report autotune-Qwen2.5-0.5B-data
  autotune lengths Qwen/Qwen2.5-0.5B data.jsonl
  autotune techniques

exit codes: 0 something fits, 1 nothing fits, 2 the input cannot be used,
3 not known (probe, check, dry-run), 70 a bug, 130 interrupted (by SIGTERM 143,
by SIGHUP 129)
"""

_NUMBER = re.compile(r"\d+(\.\d+)?")


@dataclass(frozen=True)
class ParsedCommand:
    """A parsed command: ``run`` takes ``arguments`` and returns the exit code."""

    run: Callable[[argparse.Namespace], int]
    arguments: argparse.Namespace


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ``InputError`` in place of exiting, so that all errors look alike."""

    def __init__(self, *, epilog_source: Callable[[], str] | None = None, **kwargs: object) -> None:
        # Absent options are absent from the namespace, since the API's functions define the defaults.
        super().__init__(
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **kwargs,  # type: ignore[arg-type]
        )
        self._epilog_source = epilog_source

    def format_help(self) -> str:
        """Return the help; the catalogue is read only when the help is shown."""
        if self._epilog_source is not None:
            self.epilog = self._epilog_source()
        self.description = wrap_text(self.description or "")
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        """Raise argparse's error as an ``InputError``."""
        raise InputError(f"{message[:1].upper()}{message[1:]}.", hint=f"See {self.prog} --help.")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        # argparse's message has no suggestion, and differs between versions of Python.
        if action.choices is not None and value not in action.choices:
            names = [str(each) for each in action.choices]
            what = f"a value of {action.option_strings[-1]}" if action.option_strings else "a command"
            hint = f"{suggestion(str(value), names)}Choose from {', '.join(names)}. See {self.prog} --help."
            raise InputError(f"{value!r} is not {what}.", hint=hint)

    def unknown(self, words: Sequence[str], commands: Mapping[str, Parser]) -> InputError:
        """Return the error for unknown words.

        Args:
            commands: the parsers of all commands, since another command may have the option.
        """
        word = words[0].split("=", 1)[0]
        if not word.startswith("-"):
            return InputError(f"{word!r} is one argument too many for {self.prog}.", hint=f"See {self.prog} --help.")
        others = [f"`{each.prog}`" for each in commands.values() if word in each._option_string_actions]
        hint = f"It is an option of {', '.join(others)}. " if others else suggestion(word, self._option_string_actions)
        return InputError(f"{word!r} is not an option of {self.prog}.", hint=f"{hint}See {self.prog} --help.")


def build_parser() -> Parser:
    """Return the parser of the whole command line."""
    parser = Parser(prog="autotune", description=_DESCRIPTION, epilog=_EXAMPLES)
    parser.add_argument(
        "--version", action="version", version=f"autotune {__version__}", help="show the version and exit"
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Parser)
    for command in (probe, plan, check, dry_run, report, lengths, techniques):
        name = command.__name__.rpartition(".")[2].replace("_", "-")
        subparser = commands.add_parser(
            name, help=command.SUMMARY, description=command.DESCRIPTION, epilog_source=command.epilog
        )
        command.add_arguments(subparser)
        subparser.add_argument("--debug", action="store_true", help="show the traceback of an error")
        subparser.set_defaults(run=command.run, parser=subparser, commands=commands.choices)
    return parser


def read_arguments(words: Sequence[str]) -> ParsedCommand:
    """Parse the command line into a command.

    Raises:
        InputError: an argument is unknown, missing or malformed.
        SystemExit: after --help or --version.
    """
    _check_units(words)
    arguments, unknown = build_parser().parse_known_args(words)
    subparser: Parser = arguments.parser
    if unknown:
        raise subparser.unknown(unknown, arguments.commands)
    run: Callable[[argparse.Namespace], int] = arguments.run
    for name in ("parser", "commands", "run", "debug"):
        vars(arguments).pop(name, None)
    return ParsedCommand(run, arguments)


def _check_units(words: Sequence[str]) -> None:
    """Raise an ``InputError`` for a number and its unit in two words, since the unit would be MODEL or DATASET."""
    own = words[: words.index("--")] if "--" in words else words
    for before, number, unit in zip(("", *own), own, own[1:], strict=False):
        option, given = (before, number) if before.startswith("--") else number.partition("=")[::2]
        if option.startswith("--") and _NUMBER.fullmatch(given) and unit.lower() in UNITS and not Path(unit).exists():
            raise InputError(
                f"There is a space between {given} and {unit} of {option}.",
                hint=f"Write {option} {given}{unit}.",
            )
