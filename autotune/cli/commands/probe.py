"""``autotune probe``: find the fastest configuration that fits."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from autotune.core.effort import EFFORTS
from autotune.core.status import RunStatus
from autotune.errors import InputError

SUMMARY = "find the fastest configuration that fits"
DESCRIPTION = (
    "Trains for a few real steps with one configuration after another, each in a process of its own, and hands over\n"
    "the fastest that fits: config.yaml for `trl`, train.py for Python, result.json for programs."
)
_EXIT_CODES = {RunStatus.FOUND: 0, RunStatus.NOTHING_FITS: 1, RunStatus.INTERRUPTED: 130}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments; their names are those of ``autotune.probe``."""
    parser.add_argument("model", metavar="MODEL", help="hub id, local directory, or config.json; no weights are needed")
    parser.add_argument("dataset", metavar="DATASET", help="hub id, or .jsonl, .json, .csv, .parquet file or directory")

    given = parser.add_argument_group("what is given")
    given.add_argument("--trainer", metavar="NAME", help="TRL's trainer (default: sft)")
    given.add_argument("--device", choices=("auto", "cuda", "cpu"), help="where to train (default: auto, a GPU if any)")
    given.add_argument("--memory-budget", metavar="SIZE", help="memory for training, as 24GiB (default: what is free)")
    given.add_argument(
        "--margin", type=float, metavar="SHARE", help="share of the budget to keep free, 0 to 0.5 (default: 0.05)"
    )
    given.add_argument(
        "--init", choices=("random", "pretrained"), help="random weights, or load the model's (default: random)"
    )

    same = parser.add_argument_group("what stays the same for every configuration")
    same.add_argument(
        "--global-batch-size",
        type=int,
        metavar="N",
        help="documents per optimizer step (default: 8 per process)",
    )
    kept = same.add_mutually_exclusive_group()
    kept.add_argument(
        "--max-length", type=int, metavar="TOKENS", help="tokens to which rows are cut (default: searched)"
    )
    kept.add_argument(
        "--token-coverage", type=float, metavar="SHARE", help="share of tokens to train on, 0 to 1 (default: 0.99)"
    )

    searched = parser.add_argument_group("what is searched")
    searched.add_argument(
        "--allow", action="append", metavar="KNOB[,KNOB]", help="search also this knob's choices that change training"
    )
    searched.add_argument("--fix", action="append", metavar="KNOB=VALUE", help="consider only this choice; repeatable")
    searched.add_argument(
        "--exclude", action="append", metavar="KNOB", help="leave this knob at TRL's default; repeatable"
    )
    searched.add_argument("--space", metavar="FILE", help="YAML file of knobs and choices (default: shipped)")
    searched.add_argument("--effort", choices=tuple(EFFORTS), help=f"how long to look (default: normal; {_efforts()})")
    searched.add_argument("--trials", type=int, metavar="N", help="probes at the most (default: as the effort says)")
    searched.add_argument(
        "--timeout", metavar="TIME", help="for the whole search, as 90s, 10m or 1h30m (default: none)"
    )
    searched.add_argument("--seed", type=int, metavar="N", help="of the search and the order of batches (default: 42)")

    searched.add_argument(
        "--no-plan", dest="plan", action="store_false", help="trace nothing beforehand: find out all by probing"
    )

    study = parser.add_argument_group("what is kept")
    study.add_argument("--output", metavar="DIR", help="where to write (default: autotune-<model>-<dataset>)")
    study.add_argument("--storage", metavar="URL", help="Optuna storage (default: study.db in the output directory)")
    study.add_argument("--study", metavar="NAME", help="name in that storage (default: the output directory's name)")
    study.add_argument("--resume", action="store_true", help="go on with the study that is there")
    parser.add_argument("--json", action="store_true", help="write result.json's document to stdout, and nothing else")


def epilog() -> str:
    """Return the end of the help: examples, and the knobs as the catalogue has them."""
    from autotune.techniques import catalogue
    from autotune.techniques.base import Effect

    knobs = catalogue()
    changing = [knob.name for knob in knobs if any(option.effect is Effect.CHANGES_TRAINING for option in knob.options)]
    return (
        "examples:\n"
        "  autotune probe Qwen/Qwen2.5-0.5B data.jsonl\n"
        "  autotune probe ./my-model chats.parquet --memory-budget 24GiB --allow lora,quantization\n"
        "  autotune probe ./my-model chats.parquet --fix packing=bfd --max-length 4096 --effort quick --json\n\n"
        f"knobs (`autotune techniques` explains them):\n{_lines(knob.name for knob in knobs)}\n\n"
        f"of these, --allow takes:\n{_lines(changing)}\n"
    )


def run(arguments: argparse.Namespace) -> int:
    """Search, show what was found, and return the exit code."""
    options = vars(arguments)
    as_json: bool = options.pop("json", False)
    options["fix"] = fixes(options.get("fix", ()))
    for name in ("allow", "exclude"):
        options[name] = names(options.get(name, ()))

    from autotune.api.probe import probe
    from autotune.cli.console import stderr_console, write_json
    from autotune.cli.programs import program
    from autotune.report.summary import show_summary
    from autotune.report.watch import watching

    console = stderr_console()
    with watching(console) as listener:
        result = probe(**options, listener=listener).document
    show_summary(result, console, program("trl"))
    if as_json:
        write_json(result)
    return _EXIT_CODES[result.status]


def names(lists: Iterable[str]) -> tuple[str, ...]:
    """Return the names in comma-separated lists."""
    return tuple(name.strip() for text in lists for name in text.split(",") if name.strip())


def fixes(texts: Iterable[str]) -> dict[str, str]:
    """Return the choice by knob of texts such as ``packing=bfd``.

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


def _efforts() -> str:
    return ", ".join(f"{effort.name}: {effort.trials} probes" for effort in EFFORTS.values())


def _lines(words: Iterable[str]) -> str:
    import textwrap

    return textwrap.fill(", ".join(words), 80, initial_indent="  ", subsequent_indent="  ")
