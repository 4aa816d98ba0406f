"""Users' configurations, read by TRL's parser in this process, for tests of ``--base``."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

from autotune.app.arguments import ProbeArguments
from autotune.app.base import Start, start_of
from autotune.app.options import Options, probe_options
from autotune.app.problem import problem_of
from autotune.core.jobs.protocol import ReadCommandRequest
from autotune.core.machine import Machine
from autotune.core.plan import TrainingPlan
from autotune.core.workload import Workload
from autotune.step.job import JobContext
from autotune.step.jobs.read_command import read_command
from autotune.trainers.problem import TrainerProblem
from autotune.userconfig.base import UserBase, base_from, on_device
from autotune.userconfig.written import read_written as read_file
from tests.settings import CPU, LENGTHS, workload

LONGEST = max(LENGTHS)
ROWS = "model_name_or_path: m\ndatasets: [{path: json, data_files: rows.jsonl}]\n"


def a_base(folder: Path, text: str, trainer: str = "sft", name: str = "mine.yaml") -> UserBase:
    """Return a configuration of a model, rows, and the keys of a text."""
    file = folder / name
    file.write_text(ROWS + text, encoding="utf-8", newline="")
    written = on_device(read_file(str(file), trainer), CPU.hardware)
    request = ReadCommandRequest(written.trainer, written.command.words, written.values, "cpu", launcher="trl")
    with mock.patch.dict(os.environ):
        known = read_command(request, JobContext(folder, time.monotonic()))
    return base_from(written, known)


def started(base: UserBase, of: Workload | None = None, machine: Machine = CPU, **options: Any) -> Started:
    """Return the arguments of a search with a base."""
    asked = probe_options(ProbeArguments(trainer=base.written.trainer, base=base.name, **options))
    return Started(base, asked, of or workload(), machine)


class Started:
    """A search with a base, before its first probe."""

    def __init__(self, base: UserBase, options: Options, of: Workload, machine: Machine) -> None:
        self.base, self.options = base, options
        self.start: Start = start_of(base, options, of, machine)
        self.problem: TrainerProblem = problem_of(options, of, machine, self.start.batch, self.start)

    @property
    def plan(self) -> TrainingPlan:
        """The plan of the baseline."""
        return self.problem.trainer.plan(self.problem.baseline, self.problem.setting)


def disagreements(base: UserBase, plan: TrainingPlan) -> dict[str, tuple[object, object]]:
    """Return the fields that a plan trains with otherwise than TRL does by a configuration, with both values."""
    found = {}
    for name, value in base.plan.args.items():
        ours = plan.args.get(name, base.config.defaults[name])
        # Neither cuts a row.
        if name == "max_length" and ours == LONGEST and isinstance(value, int) and value > LONGEST:
            continue
        # Classes fill in unset fields.
        if ours != value and ours is not None and name in base.file.values:
            found[name] = (value, ours)
    for name, value in base.plan.model.items():
        ours = plan.model.get(name, base.model.defaults.get(name))
        if ours != value and (ours or value):
            found[name] = (value, ours)
    return found
