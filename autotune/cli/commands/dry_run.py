"""The command ``autotune dry-run``: runs a training script for a few steps on null GPUs to check whether it fits."""

from __future__ import annotations

import argparse

from autotune.app.arguments import DryRunArguments
from autotune.cli.arguments import add_json, add_options, options_of

SUMMARY = "run any training script for a few steps on null GPUs to check whether it fits"
DESCRIPTION = (
    "Runs an unchanged training script without a GPU: on null GPUs, which compute nothing and count memory as CUDA "
    "does. The largest rows of its data come first, and it ends after a few steps. Needs PyTorch's CUDA build in the "
    "script's environment, Linux on x86-64 and g++."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments: those of ``autotune.dry_run``."""
    add_options(parser, DryRunArguments)
    add_json(parser, "the result")


def epilog() -> str:
    """Return the end of the help."""
    return (
        "examples:\n"
        "  autotune dry-run --gpu H100-80GB -- python train.py\n"
        "  autotune dry-run --gpu A100-80GB -- accelerate launch --num_processes 2 train.py\n"
        "  autotune dry-run --gpu 24GiB --timeout 10m -- trl dpo --config config.yaml\n\n"
        "exit codes: 0 fits, 1 does not fit, 2 the command cannot run,\n"
        "3 fits the batches that ran, or not known\n"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command dry, and return the exit code."""
    options, as_json = options_of(arguments)
    options.setdefault("command", [])

    from autotune.app.dry_run import dry_run
    from autotune.cli.console import stderr_console, write_result
    from autotune.reporting.dry_run import dry_run_report
    from autotune.reporting.watch import plain_lines

    # The script writes to the same terminal, so there is no live display.
    result = dry_run(**options, listener=plain_lines(stderr_console()))
    write_result(result, dry_run_report, as_json=as_json)
    return result.exit_code
