"""Writes the bundle: the output directory of a run of ``autotune probe``."""

from __future__ import annotations

from pathlib import Path

from autotune.core.result import Choosable, Result
from autotune.core.status import RunStatus
from autotune.emit.config import config_text
from autotune.emit.document import json_text
from autotune.emit.files import remove, write_text
from autotune.emit.rows import remove_rows, write_rows
from autotune.emit.script import script_text
from autotune.trainers import find_trainer

CONFIG = "config.yaml"
SCRIPT = "train.py"
RESULT = "result.json"


def write_bundle(result: Result, directory: Path) -> None:
    """Write ``result.json``, and for a recommendation ``config.yaml``, ``train.py`` and the rows that they need.

    A run that ended without a recommendation removes an earlier one's configuration; an interrupted one leaves it.
    ``result.json`` is written last, so that if it exists, the files it refers to exist too.

    Raises:
        InputError: the directory cannot be made or written, or the disk is full.
    """
    if result.recommended is not None:
        _write_recommendation(result, result.recommended, directory)
    elif result.status is not RunStatus.INTERRUPTED:
        for name in (CONFIG, SCRIPT):
            remove(directory / name)
        remove_rows(directory)
    write_text(directory / RESULT, json_text(result))


def _write_recommendation(result: Result, chosen: Choosable, directory: Path) -> None:
    rows = write_rows(result.workload, chosen.plan, directory)
    if find_trainer(result.trainer).runs_by_command(chosen.plan):
        write_text(directory / CONFIG, config_text(result, chosen, rows))
    else:
        remove(directory / CONFIG)
    write_text(directory / SCRIPT, script_text(result, chosen, rows))
