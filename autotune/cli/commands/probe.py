"""``autotune probe``: find the fastest configuration that fits."""

from __future__ import annotations

import argparse

from autotune.cli.arguments import (
    add_dataset,
    add_device,
    add_evaluation,
    add_json,
    add_memory_budget,
    add_model,
    add_num_processes,
    add_rollouts,
    add_same_training,
    add_space,
    add_trainer,
    add_workers,
    listed,
    options_of,
    trainer_names,
)
from autotune.core.effort import EFFORTS
from autotune.core.status import RunStatus
from autotune.errors import InputError, UnwrittenError

SUMMARY = "find the fastest configuration that fits"
DESCRIPTION = (
    "Trains for a few real steps with one configuration after another, each in a process of its own, and hands over\n"
    "the fastest that fits: config.yaml for `trl`, train.py for Python, result.json for programs."
)
_EXIT_CODES = {RunStatus.FOUND: 0, RunStatus.NOTHING_FITS: 1, RunStatus.INTERRUPTED: 130}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments; their names are those of ``autotune.probe``."""
    add_model(parser, optional=True)
    add_dataset(parser, optional=True)

    given = parser.add_argument_group("what is given")
    given.add_argument(
        "--base", metavar="FILE", help="your own configuration of TRL's to start from; it may name model and dataset"
    )
    add_trainer(given)
    add_evaluation(given)
    add_rollouts(given)
    add_device(given, "where to train")
    add_num_processes(given, "one on each visible GPU, or one on a CPU; with --workers one")
    add_workers(given)
    add_memory_budget(given, "what is free")
    given.add_argument(
        "--margin", type=float, metavar="SHARE", help="share of the budget to keep free, 0 to 0.5 (default: 0.05)"
    )
    given.add_argument(
        "--init", choices=("random", "pretrained"), help="random weights, or load the model's (default: random)"
    )

    same = parser.add_argument_group("what stays the same for every configuration")
    add_same_training(same, batch="8 per process", max_length="searched")

    searched = parser.add_argument_group("what is searched")
    add_space(searched)
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
    study.add_argument(
        "--storage",
        metavar="URL",
        help="Optuna storage, the same for all workers of a study (default: study.db in the output directory)",
    )
    study.add_argument("--study", metavar="NAME", help="name in that storage (default: the output directory's name)")
    study.add_argument(
        "--resume", action="store_true", help="go on with the study that is there, or join those who search it"
    )
    add_json(parser, "result.json's document")


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
        "  autotune probe ./my-model chats.parquet --fix packing=bfd --max-length 4096 --effort quick --json\n"
        "  autotune probe --base my-config.yaml --memory-budget 24GiB\n\n"
        f"knobs (`autotune techniques` explains them):\n{listed(knob.name for knob in knobs)}\n\n"
        f"of these, --allow takes:\n{listed(changing)}\n\n"
        f"{trainer_names()}"
    )


def run(arguments: argparse.Namespace) -> int:
    """Search, show the result, and return the exit code."""
    options, as_json = options_of(arguments)
    if "base" not in options and "dataset" not in options:
        missing = "DATASET" if "model" in options else "MODEL, DATASET"
        raise InputError(
            f"The following arguments are required: {missing}.",
            hint="Or a configuration that names them, with --base. See autotune probe --help.",
        )

    from autotune.api.probe import probe
    from autotune.cli.console import stderr_console, write_json
    from autotune.cli.programs import program
    from autotune.reporting.probe import probe_report
    from autotune.reporting.terminal import show
    from autotune.reporting.watch import watching

    console = stderr_console()
    with watching(console) as listener:
        try:
            result, failure = probe(**options, listener=listener).document, None
        except UnwrittenError as error:
            result, failure = error.document, error
    show(probe_report(result, program("trl")), console, apart=True)
    if as_json:
        write_json(result)
    if failure is not None:
        raise failure
    return _EXIT_CODES[result.status]


def _efforts() -> str:
    return ", ".join(f"{effort.name}: {effort.trials} probes" for effort in EFFORTS.values())
