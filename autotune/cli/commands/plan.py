"""``autotune plan``: predict memory and speed of every configuration, with no GPU."""

from __future__ import annotations

import argparse

SUMMARY = "predict what fits and how fast it is, with no GPU"
DESCRIPTION = (
    "Runs TRL's own training step on a virtual accelerator, with no GPU and no weights, and predicts for every\n"
    "configuration the memory that it needs and the speed that it reaches on a GPU that need not be here.\n"
    "Predictions are no measurements: their errors are stated, and autotune probe measures."
)
_LIST = "list"
_TOP = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments; their names are those of ``autotune.plan``."""
    parser.add_argument("model", metavar="MODEL", nargs="?", help="hub id, local directory, or config.json")
    parser.add_argument(
        "dataset", metavar="DATASET", nargs="?", help="hub id, or .jsonl, .json, .csv, .parquet file or directory"
    )
    parser.add_argument("--trainer", metavar="NAME", help="TRL's trainer (default: sft)")
    parser.add_argument(
        "--gpu",
        metavar="NAME|SIZE",
        help="such as H100-80GB, or 24GiB, or cpu (default: this machine's GPU); list: show all that are known",
    )
    parser.add_argument("--seq-len", type=int, metavar="TOKENS", help="tokens of every row, instead of a dataset")
    parser.add_argument("--memory-budget", metavar="SIZE", help="memory for training, as 24GiB (default: all of it)")
    parser.add_argument("--global-batch-size", type=int, metavar="N", help="documents per optimizer step (default: 8)")
    kept = parser.add_mutually_exclusive_group()
    kept.add_argument("--max-length", type=int, metavar="TOKENS", help="tokens to which rows are cut (default: all)")
    kept.add_argument("--token-coverage", type=float, metavar="SHARE", help="share of tokens to train on, 0 to 1")
    parser.add_argument(
        "--allow", action="append", metavar="KNOB[,KNOB]", help="look also at choices of this knob that change training"
    )
    parser.add_argument("--fix", action="append", metavar="KNOB=VALUE", help="look only at this choice; repeatable")
    parser.add_argument("--exclude", action="append", metavar="KNOB", help="leave this knob at TRL's default")
    parser.add_argument("--space", metavar="FILE", help="YAML file of knobs and choices (default: shipped)")
    parser.add_argument("--top", type=int, metavar="N", help="candidates to show, the best first (default: 20)")
    parser.add_argument("--json", action="store_true", help="write all estimates to stdout as JSON, and nothing else")


def epilog() -> str:
    """Return the end of the help."""
    return (
        "examples:\n"
        "  autotune plan Qwen/Qwen2.5-0.5B --seq-len 2048 --gpu RTX4090\n"
        "  autotune plan ./my-model chats.parquet --gpu 24GiB --allow lora,quantization\n"
        "  autotune plan ./my-model --seq-len 2048 --gpu T4 --fix lora=r16 --fix quantization=4bit-nf4 --json\n"
        "  autotune plan --gpu list\n\n"
        "exit codes: 0 something is predicted to fit, 1 nothing is, 2 the input cannot be used\n"
    )


def run(arguments: argparse.Namespace) -> int:
    """Plan, show the estimates, and return the exit code: 1 where nothing is predicted to fit."""
    from autotune.cli.commands.probe import fixes, names
    from autotune.cli.console import stderr_console, stdout_console, write_json
    from autotune.errors import InputError
    from autotune.report.gpus import show_gpus
    from autotune.report.plan import show_plan
    from autotune.report.watch import watching

    options = vars(arguments)
    as_json: bool = options.pop("json", False)
    if options.get("gpu") == _LIST:
        from autotune.inspection.gpus import gpus

        if as_json:
            write_json(gpus())
        else:
            show_gpus(gpus(), stdout_console())
        return 0
    if options.get("model") is None:
        raise InputError("There is no MODEL.", hint="See autotune plan --help.")
    options["fix"] = fixes(options.get("fix", ()))
    for name in ("allow", "exclude"):
        options[name] = names(options.get(name, ()))

    from autotune.api.plan import plan

    with watching(stderr_console()) as listener:
        found = plan(**options, listener=listener)
    if as_json:
        write_json(found)
    else:
        show_plan(found, stdout_console(), int(options.get("top", _TOP)))
    return 0 if found.fastest is not None else 1
