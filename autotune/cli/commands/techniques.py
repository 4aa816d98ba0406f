"""``autotune techniques``: the knobs, their choices, and what this machine can do."""

from __future__ import annotations

import argparse

SUMMARY = "list the knobs, their choices, and what this machine can do"
DESCRIPTION = (
    "Lists every knob with its choices, what each does to training, what it needs, and whether this machine has it."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments; their names are those of ``autotune.techniques``."""
    parser.add_argument("--trainer", metavar="NAME", help="TRL's trainer (default: sft)")
    parser.add_argument(
        "--device", choices=("auto", "cuda", "cpu"), help="for which device (default: auto, a GPU if any)"
    )
    parser.add_argument("--json", action="store_true", help="write the catalogue to stdout as JSON, and nothing else")


def epilog() -> str:
    """Return the end of the help."""
    return "example:\n  autotune techniques --device cpu\n"


def run(arguments: argparse.Namespace) -> int:
    """Show the catalogue and return the exit code."""
    options = vars(arguments)
    as_json: bool = options.pop("json", False)

    from autotune.api.catalogue import catalogue
    from autotune.cli.console import stdout_console, write_json
    from autotune.report.techniques import show_techniques

    rows = catalogue(**options)
    if as_json:
        write_json(rows)
    else:
        show_techniques(rows, stdout_console())
    return 0
