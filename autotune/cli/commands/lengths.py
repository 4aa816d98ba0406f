"""``autotune lengths``: how long a dataset's rows are in tokens, and what each maximum length keeps."""

from __future__ import annotations

import argparse

SUMMARY = "show how long a dataset's rows are, and what each max_length keeps"
DESCRIPTION = (
    "Tokenises a dataset as the trainer would, and shows the distribution of its lengths: histogram, quantiles, and\n"
    "for each max_length the tokens that it keeps and drops."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments; their names are those of ``autotune.lengths``."""
    parser.add_argument("model", metavar="MODEL", help="hub id, local directory, or config.json with a tokenizer")
    parser.add_argument("dataset", metavar="DATASET", help="hub id, or .jsonl, .json, .csv, .parquet file or directory")
    parser.add_argument("--trainer", metavar="NAME", help="TRL's trainer (default: sft)")
    parser.add_argument("--json", action="store_true", help="write the figures to stdout as JSON, and nothing else")


def epilog() -> str:
    """Return the end of the help."""
    return "example:\n  autotune lengths Qwen/Qwen2.5-0.5B data.jsonl\n"


def run(arguments: argparse.Namespace) -> int:
    """Show the lengths and return the exit code."""
    options = vars(arguments)
    as_json: bool = options.pop("json", False)

    from autotune.api.lengths import lengths
    from autotune.cli.console import stderr_console, stdout_console, write_json
    from autotune.report.lengths import show_lengths
    from autotune.report.watch import watching

    with watching(stderr_console()) as listener:
        report = lengths(**options, listener=listener)
    if as_json:
        write_json(report)
    else:
        show_lengths(report, stdout_console())
    return 0
