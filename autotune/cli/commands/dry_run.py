"""``autotune dry-run``: run a training script for a few steps on null GPUs, and say whether it fits."""

from __future__ import annotations

import argparse

from autotune.cli.arguments import add_json, options_of

SUMMARY = "run any training script for a few steps on null GPUs, and say whether it fits"
DESCRIPTION = (
    "Runs a training script as it is, without a GPU: on null GPUs, which compute nothing and count memory as CUDA\n"
    "does. The largest rows of its data come first, and it is ended after a few steps. Needs PyTorch's CUDA build in\n"
    "the script's environment, Linux on x86-64 and g++."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments; their names are those of ``autotune.dry_run``."""
    parser.add_argument("command", metavar="COMMAND", nargs="*", help="what starts the training, behind --")
    parser.add_argument("--gpu", metavar="NAME|SIZE", help="such as H100-80GB or 24GiB (default: this machine's)")
    parser.add_argument(
        "--num-processes", type=int, metavar="N", help="null GPUs (default: as many processes as the command starts)"
    )
    parser.add_argument("--steps", type=int, metavar="N", help="optimizer steps after which it is ended (default: 3)")
    parser.add_argument(
        "--as-shuffled", action="store_true", help="leave the rows in the script's order, not the largest first"
    )
    parser.add_argument("--timeout", metavar="TIME", help="end it after that time, as 90s or 10m (default: none)")
    add_json(parser, "the result")


def epilog() -> str:
    """Return the end of the help."""
    return (
        "examples:\n"
        "  autotune dry-run --gpu H100-80GB -- python train.py\n"
        "  autotune dry-run --gpu A100-80GB -- accelerate launch --num_processes 2 train.py\n"
        "  autotune dry-run --gpu 24GiB --timeout 10m -- trl dpo --config config.yaml\n\n"
        "exit codes: 0 fits, 1 does not fit, 2 the command cannot run, 3 fits the batches that ran, or not known\n"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command dry, and return the exit code."""
    options, as_json = options_of(arguments)
    options.setdefault("command", [])

    from autotune.api.dry_run import dry_run
    from autotune.cli.console import stderr_console, stdout_console, write_json
    from autotune.reporting.dry_run import dry_run_report
    from autotune.reporting.plain import PlainListener
    from autotune.reporting.terminal import show

    # The script draws on the same terminal.
    console = stderr_console()
    found = dry_run(**options, listener=PlainListener(lambda line: console.print(line, markup=False, soft_wrap=True)))
    if as_json:
        write_json(found)
    else:
        show(dry_run_report(found), stdout_console())
    return found.exit_code
