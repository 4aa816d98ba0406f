"""The command ``autotune lengths``: shows the lengths of a dataset's rows in tokens."""

from __future__ import annotations

import argparse

from autotune.app.arguments import LengthsArguments
from autotune.cli.arguments import add_json, add_options, options_of, trainer_names

SUMMARY = "show how long a dataset's rows are, and what each max_length keeps"
DESCRIPTION = (
    "Tokenises a dataset as the trainer does, and shows the distribution of its lengths: histogram, quantiles, and "
    "the tokens that each max_length keeps and drops."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments: those of ``autotune.lengths``."""
    add_options(parser, LengthsArguments)
    add_json(parser, "the figures")


def epilog() -> str:
    """Return the end of the help."""
    return f"example:\n  autotune lengths Qwen/Qwen2.5-0.5B data.jsonl\n\n{trainer_names()}"


def run(arguments: argparse.Namespace) -> int:
    """Show the lengths and return the exit code."""
    options, as_json = options_of(arguments)

    from autotune.app.lengths import lengths
    from autotune.cli.console import stderr_console, write_result
    from autotune.reporting.lengths import lengths_report
    from autotune.reporting.watch import watching

    with watching(stderr_console()) as listener:
        report = lengths(**options, listener=listener)
    write_result(report, lengths_report, as_json=as_json)
    return 0
