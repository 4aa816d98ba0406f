"""The command ``autotune report``: writes the result of a search as an HTML or Markdown page."""

from __future__ import annotations

import argparse

SUMMARY = "write the result of a run as a page"
DESCRIPTION = (
    "Reads the result.json of a run of `autotune probe` and writes one page that opens from disk: the verdict, memory "
    "against speed, the contribution of each choice, every candidate. It needs no network and measures nothing."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments; their names are those of ``autotune.report``."""
    parser.add_argument("directory", metavar="DIR", help="output directory of `autotune probe`, or its result.json")
    parser.add_argument("--output", metavar="FILE", help="file to write (default: DIR/report.html or DIR/report.md)")
    parser.add_argument("--format", choices=("html", "markdown"), help="format of the file (default: html)")


def epilog() -> str:
    """Return the end of the help."""
    return "example:\n  autotune report autotune-Qwen2.5-0.5B-data"


def run(arguments: argparse.Namespace) -> int:
    """Write the report and return the exit code."""
    from autotune.app.report import report
    from autotune.cli.console import stdout_console

    file = report(**vars(arguments))
    stdout_console().print(f"wrote {file}", soft_wrap=True, markup=False, highlight=False)
    return 0
