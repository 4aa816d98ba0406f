"""The command ``autotune probe``: finds the fastest configuration that fits, by real training steps."""

from __future__ import annotations

import argparse
from contextlib import suppress

from autotune.app.arguments import ProbeArguments
from autotune.cli.arguments import add_json, add_options, indented, options_of, trainer_names
from autotune.core.effort import EFFORTS
from autotune.core.setting import GLOBAL_BATCH
from autotune.core.status import RunStatus
from autotune.errors import InputError, InterruptedSearchError, UnwrittenError

SUMMARY = "find the fastest configuration that fits"
DESCRIPTION = (
    "Trains a few real steps with one configuration after another, each in its own process, and writes the "
    "fastest that fits: config.yaml for `trl`, train.py for Python, result.json for programs."
)
_GROUPS = {
    "workload and device": (),
    "equal in every candidate": ("global_batch_size", "max_length", "token_coverage"),
    "search": ("allow", "fix", "exclude", "space", "effort", "trials", "timeout", "seed", "plan"),
    "output and study": ("output", "storage", "study", "resume"),
}
_EXIT_CODES = {
    RunStatus.FOUND: 0,
    RunStatus.NOTHING_FITS: 1,
    RunStatus.FAILED: 1,
    RunStatus.UNDECIDED: 3,
    RunStatus.INTERRUPTED: 130,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments: those of ``autotune.probe``."""
    add_options(parser, ProbeArguments, groups=_GROUPS)
    add_json(parser, "result.json's document")


def epilog() -> str:
    """Return the end of the help: examples, knobs, efforts, trainers and exit codes."""
    from autotune.techniques import catalogue
    from autotune.techniques.base import how_changes
    from autotune.trainers import trainers

    knobs, depends = catalogue(), {name: known.loss_depends_on({}) for name, known in trainers().items()}
    changing = [knob.name for knob in knobs if any(how_changes(knob, name, depends[name]) for name in depends)]
    return (
        "examples:\n"
        "  autotune probe Qwen/Qwen2.5-0.5B data.jsonl\n"
        "  autotune probe ./my-model chats.parquet --memory-budget 24GiB --allow lora,quantization\n"
        "  autotune probe ./my-model chats.parquet --fix packing=bfd --max-length 4096 --effort quick --json\n"
        "  autotune probe --base my-config.yaml --memory-budget 24GiB\n\n"
        f"knobs (`autotune techniques` explains them):\n{indented(knob.name for knob in knobs)}\n\n"
        f"--allow takes {GLOBAL_BATCH}, and of these:\n{indented(changing)}\n\n"
        f"--effort takes:\n{indented(f'{name} ({effort.trials} probes)' for name, effort in EFFORTS.items())}\n\n"
        f"{trainer_names()}\n"
        "exit codes: 0 a candidate is recommended, 1 nothing fits, or every probe failed,\n"
        "2 the input cannot be used, 3 a limit ended the search before any probe decided"
    )


def run(arguments: argparse.Namespace) -> int:
    """Search, show the result, and return the exit code."""
    options, as_json = options_of(arguments)
    if "base" not in options and "dataset" not in options:
        missing = "DATASET" if "model" in options else "MODEL, DATASET"
        raise InputError(
            f"The following arguments are required: {missing}.",
            hint="Give them, or --base with a configuration that names them. See autotune probe --help.",
        )

    from autotune.api.probe import probe
    from autotune.cli.console import stderr_console, stdout_console, write_json
    from autotune.cli.programs import program
    from autotune.reporting.probe import probe_report
    from autotune.reporting.terminal import show
    from autotune.reporting.watch import watching

    progress = stderr_console()
    with watching(progress) as listener:
        try:
            result, failure = probe(**options, listener=listener).document, None
        except InterruptedSearchError as error:
            result, failure = error.document, None
        except UnwrittenError as error:
            result, failure = error.document, error
    # The search has ended: an interrupt only skips the report.
    with suppress(KeyboardInterrupt):
        show(probe_report(result, program), progress if as_json else stdout_console(), apart=True)
    if as_json:
        write_json(result)
    if failure is not None:
        raise failure
    return _EXIT_CODES[result.status]
