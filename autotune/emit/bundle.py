"""Writes the bundle: the output directory of ``autotune probe``, or of a plan."""

from __future__ import annotations

import json
from pathlib import Path

from autotune.core.bundle import Basis, PlannedBundle
from autotune.core.result import Result, Timelines
from autotune.core.status import RunStatus
from autotune.emit.arguments import PEFT_CONFIG
from autotune.emit.document import json_text
from autotune.emit.figures import measured
from autotune.emit.files import remove, write_text
from autotune.emit.handover import Handover
from autotune.emit.launch import ACCELERATE, DEEPSPEED, launch_files
from autotune.emit.rows import remove_rows, write_rows
from autotune.emit.serving import SERVE, TRAIN, shell_script, training_gpus, visible
from autotune.emit.training import config_text, script_text
from autotune.trainers import find_trainer

CONFIG = "config.yaml"
SCRIPT = "train.py"
RESULT = "result.json"
TIMELINE = "timeline.json"
PLAN = "plan.json"
UNFINISHED = "unfinished.json"
"""Marks the directory of a planned bundle while it is written, so that an unfinished one can be replaced."""
_SERVER_SCRIPTS = (SERVE, TRAIN)
_FIND_DIRECTORY = 'here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"'
"""Shell line that finds the script's own directory, wherever the script is started."""
_TRAINING_FILES = (CONFIG, SCRIPT, PEFT_CONFIG, ACCELERATE, DEEPSPEED, *_SERVER_SCRIPTS)
"""The files of a training, except its rows."""


def write_bundle(result: Result, directory: Path) -> None:
    """Write ``result.json`` with its ``timeline.json``, and for a recommendation ``config.yaml``, ``train.py`` and the
    files that they need.

    ``config.yaml`` is missing if TRL's command line cannot run the plan.

    If nothing fits or every probe failed, an earlier run's configuration is removed; an undecided run keeps it.
    ``result.json`` is written last, so that if it exists, the files it refers to exist too.

    Raises:
        InputError: the directory cannot be made or written, or the disk is full.
    """
    if result.recommended is not None:
        _write_training(measured(result, result.recommended), directory)
    elif result.status in (RunStatus.NOTHING_FITS, RunStatus.FAILED):
        _remove_training(directory)
    if result.timelines != Timelines(None, None):
        write_text(directory / TIMELINE, json_text(result.timelines))
    else:
        remove(directory / TIMELINE)
    write_text(directory / RESULT, json_text(result))


def write_planned_bundle(document: PlannedBundle, handover: Handover, directory: Path) -> None:
    """Write the planned training with its files, and ``plan.json`` last.

    Raises:
        InputError: the directory cannot be made or written, or the disk is full.
    """
    write_text(directory / UNFINISHED, json.dumps({"basis": Basis.PLANNED}) + "\n")
    _write_training(handover, directory)
    write_text(directory / PLAN, json_text(document))
    remove(directory / UNFINISHED)


def remove_planned_bundle(directory: Path) -> None:
    """Remove an earlier planned bundle from a directory that gets no new one.

    Raises:
        InputError: a file cannot be removed.
    """
    _remove_training(directory)
    remove(directory / UNFINISHED)
    remove(directory / PLAN)


def _remove_training(directory: Path) -> None:
    for name in _TRAINING_FILES:
        remove(directory / name)
    remove_rows(directory)


def _write_training(handover: Handover, directory: Path) -> None:
    """Write the files of a training, and remove files that only an earlier training needed."""
    plan = handover.plan
    rows = write_rows(handover.workload, plan, directory)
    user_document = handover.base.launch if handover.base is not None else {}
    texts = {
        SCRIPT: script_text(handover, rows),
        **launch_files(plan, directory, user_document),
        **_server_scripts(handover),
    }
    if find_trainer(plan.trainer).runs_by_command(plan):
        texts[CONFIG] = config_text(handover, rows, directory)
    if plan.peft:
        texts[PEFT_CONFIG] = json.dumps(dict(plan.peft), indent=2) + "\n"
    for name in _TRAINING_FILES:
        if name in texts:
            write_text(directory / name, texts[name], executable=name in _SERVER_SCRIPTS)
        else:
            remove(directory / name)


def _server_scripts(handover: Handover) -> dict[str, str]:
    """Return the scripts of a vLLM server and of its training, by their names; none without a server."""
    split, plan = handover.server, handover.plan
    if split is None:
        return {}
    start = f'python "$here/{SCRIPT}"'
    if find_trainer(plan.trainer).runs_by_command(plan):
        start = f'trl {plan.trainer} --config "$here/{CONFIG}"'
    elif plan.in_group:
        start = f'accelerate launch --config_file "$here/{ACCELERATE}" "$here/{SCRIPT}"'
    origin = f"{handover.basis.value.capitalize()} by autotune"
    serve = (
        f"{origin}: vLLM's server, which generates for {TRAIN}. Start it first, and end it when the training has ended."
    )
    train = f"{origin}: the training, which gets its completions from the server of {SERVE}."
    return {
        SERVE: shell_script(serve, split.serve),
        TRAIN: shell_script(train, f"{visible(training_gpus(split))} {start}", _FIND_DIRECTORY),
    }
