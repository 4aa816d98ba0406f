"""The command ``autotune techniques``: lists the knobs, their choices, and which of them can be used."""

from __future__ import annotations

import argparse

from autotune.app.arguments import CatalogueArguments
from autotune.cli.arguments import add_json, add_options, options_of, trainer_names

SUMMARY = "list the knobs, their choices, and which of them can be used here"
DESCRIPTION = (
    "Lists every knob: its choices, their effect on training, their requirements, and why a choice cannot be used here."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments: those of ``autotune.catalogue``."""
    add_options(parser, CatalogueArguments)
    add_json(parser, "the catalogue")


def epilog() -> str:
    """Return the end of the help."""
    return f"example:\n  autotune techniques --device cpu\n\n{trainer_names()}"


def run(arguments: argparse.Namespace) -> int:
    """Show the catalogue and return the exit code."""
    options, as_json = options_of(arguments)

    from autotune.app.catalogue import catalogue
    from autotune.cli.console import write_result
    from autotune.reporting.catalogues import techniques_report

    rows = catalogue(**options)
    write_result(rows, techniques_report, as_json=as_json)
    return 0
