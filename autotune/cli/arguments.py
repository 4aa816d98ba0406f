"""Arguments shared by several commands and their conversion; the names are those of the API's parameters."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from autotune.errors import InputError
from autotune.trainers import DEFAULT

AUTO = "auto"
"""The word for as many GPUs as a plan finds worth it."""


def add_model(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """Declare MODEL, which is required unless ``optional``."""
    text = "hub id, local directory, or config.json; no weights are needed"
    parser.add_argument("model", metavar="MODEL", help=text, nargs="?" if optional else None)


def add_dataset(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """Declare DATASET, which is required unless ``optional``."""
    text = "hub id, or .jsonl, .json, .csv, .parquet file or directory"
    parser.add_argument("dataset", metavar="DATASET", help=text, nargs="?" if optional else None)


def add_trainer(parser: argparse._ActionsContainer) -> None:
    """Declare --trainer; the end of the help lists the names (:func:`trainer_names`)."""
    parser.add_argument("--trainer", metavar="NAME", help=f"TRL's trainer (default: {DEFAULT})")


def add_evaluation(parser: argparse._ActionsContainer) -> None:
    """Declare the arguments that name the rows to evaluate on."""
    parser.add_argument("--eval-dataset", metavar="DATASET", help="rows to evaluate on (default: no evaluation)")
    parser.add_argument(
        "--eval-split", metavar="NAME", help="split to evaluate on, of --eval-dataset or else of DATASET, such as test"
    )


def add_rollouts(parser: argparse._ActionsContainer) -> None:
    """Declare the arguments of trainers that generate completions."""
    parser.add_argument(
        "--reward-funcs",
        action="append",
        metavar="NAME[,NAME]",
        help="reward functions, as my_rewards.length (default: one of TRL's that costs nothing)",
    )
    parser.add_argument(
        "--completion-length",
        metavar="TOKENS|COLUMN",
        help="mean length of completions, or the column that holds some (default: half of max_completion_length)",
    )
    parser.add_argument(
        "--prompt-coverage",
        type=float,
        metavar="SHARE",
        help="share of prompts to keep, as 0.99: the longest are dropped (default: 1, all)",
    )


def add_device(parser: argparse._ActionsContainer, what: str) -> None:
    """Declare --device; ``what`` describes its purpose."""
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), help=f"{what} (default: auto, a GPU if any)")


def add_num_processes(parser: argparse._ActionsContainer, default: str) -> None:
    """Declare --num-processes; ``default`` describes its default."""
    parser.add_argument(
        "--num-processes", type=int, metavar="N", help=f"processes that train together (default: {default})"
    )


def add_workers(parser: argparse._ActionsContainer) -> None:
    """Declare --workers."""
    parser.add_argument(
        "--workers",
        type=_number_or_auto,
        metavar="N|auto",
        help="probe N candidates at the same time, each on GPUs of its own or a share of the CPU; auto: all GPUs",
    )


def add_planned_processes(parser: argparse._ActionsContainer) -> None:
    """Declare --num-processes, --num-machines and --network of GPUs that need not be here."""
    parser.add_argument(
        "--num-processes",
        type=_number_or_auto,
        metavar="N|auto",
        help="GPUs that train together, in all (default: 1, or without --gpu all that are visible); "
        "auto: the fewest that fit, or more if each trains more",
    )
    parser.add_argument(
        "--num-machines", type=int, metavar="M", help="machines that these are in, equally (default: one for every 8)"
    )
    parser.add_argument(
        "--network",
        type=float,
        metavar="GBIT",
        help="Gbit/s that each machine sends to the others in all, as 3200 (default: as within a machine)",
    )


def _number_or_auto(text: str) -> int | str:
    if text != AUTO and not text.lstrip("-").isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor {AUTO}")
    return text if text == AUTO else int(text)


def add_memory_budget(parser: argparse._ActionsContainer, default: str) -> None:
    """Declare --memory-budget; ``default`` describes its default."""
    parser.add_argument(
        "--memory-budget", metavar="SIZE", help=f"memory of each process, as 24GiB (default: {default})"
    )


def add_same_training(parser: argparse._ActionsContainer, *, batch: str, max_length: str) -> None:
    """Declare the arguments that are the same for every configuration; the texts describe their defaults."""
    parser.add_argument(
        "--global-batch-size", type=int, metavar="N", help=f"documents per optimizer step (default: {batch})"
    )
    kept = parser.add_mutually_exclusive_group()
    kept.add_argument(
        "--max-length",
        type=int,
        metavar="TOKENS",
        help=f"tokens at which the trainer cuts or drops rows (default: {max_length})",
    )
    kept.add_argument(
        "--token-coverage", type=float, metavar="SHARE", help="share of tokens to train on, 0 to 1 (default: 0.99)"
    )


def add_space(parser: argparse._ActionsContainer) -> None:
    """Declare the arguments that define the search space."""
    parser.add_argument(
        "--allow", action="append", metavar="KNOB[,KNOB]", help="consider also this knob's choices that change training"
    )
    parser.add_argument("--fix", action="append", metavar="KNOB=VALUE", help="consider only this choice; repeatable")
    parser.add_argument(
        "--exclude", action="append", metavar="KNOB[,KNOB]", help="leave this knob at TRL's default; repeatable"
    )
    parser.add_argument("--space", metavar="FILE", help="YAML file of knobs and choices (default: shipped)")


def add_json(parser: argparse.ArgumentParser, what: str) -> None:
    """Declare --json; ``what`` describes the output."""
    parser.add_argument("--json", action="store_true", help=f"write {what} to stdout as JSON, and nothing else")


def options_of(arguments: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Return the arguments of the API's function, and whether JSON output is requested.

    Raises:
        InputError: --fix has another form, or contradicts itself.
    """
    options = vars(arguments)
    as_json: bool = options.pop("json", False)
    if "fix" in options:
        options["fix"] = fixes(options["fix"])
    for name in ("allow", "exclude", "reward_funcs"):
        if name in options:
            options[name] = names(options[name])
    return options, as_json


def names(lists: Iterable[str]) -> tuple[str, ...]:
    """Return the names in comma-separated lists."""
    return tuple(name.strip() for text in lists for name in text.split(",") if name.strip())


def fixes(texts: Iterable[str]) -> dict[str, str]:
    """Return choices by knob from texts such as ``packing=bfd``.

    Raises:
        InputError: a text has another form, or two contradict each other.
    """
    fixed: dict[str, str] = {}
    for text in texts:
        knob, equals, choice = (part.strip() for part in text.partition("="))
        if not (knob and equals and choice):
            raise InputError(
                f"--fix {text!r} does not name a knob and a choice.", hint="Write for instance packing=bfd."
            )
        if fixed.setdefault(knob, choice) != choice:
            raise InputError(f"--fix {knob}={choice} contradicts --fix {knob}={fixed[knob]}.", hint="Give one of them.")
    return fixed


def trainer_names() -> str:
    """Return the part of a help's epilog that lists the values of --trainer."""
    from autotune.trainers import trainers

    return f"--trainer takes:\n{listed(trainers())}\n"


def listed(words: Iterable[str]) -> str:
    """Return words as indented lines of a help."""
    import textwrap

    return textwrap.fill(", ".join(words), 80, initial_indent="  ", subsequent_indent="  ")
