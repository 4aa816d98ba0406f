"""The use case behind ``autotune lengths``: the distribution of a dataset's token lengths."""

from __future__ import annotations

import tempfile
from pathlib import Path

from autotune.app.workload import WorkloadReader
from autotune.core.events import Listener, ignore
from autotune.core.length_report import LengthReport, length_report
from autotune.inspection.dataset import dataset_source
from autotune.inspection.machine import machine as inspect_machine
from autotune.inspection.model import model_source
from autotune.probing import JobServer
from autotune.trainers import find_trainer


def lengths(model: str, dataset: str, *, trainer: str = "sft", listener: Listener = ignore) -> LengthReport:
    """Tokenise a dataset as the trainer would, and return the distribution of its lengths.

    Args:
        model: hub id, local directory or ``config.json``; its tokenizer and chat template are used.
        dataset: hub id, or a local file or directory.
        trainer: whose dataset formats are understood.
        listener: is told what is going on.

    Raises:
        InputError: the model or the dataset cannot be used.
    """
    name = find_trainer(trainer).name
    source, rows = model_source(model, "random"), dataset_source(dataset)
    inspect_machine("cpu")
    with tempfile.TemporaryDirectory(prefix="autotune-") as folder, JobServer("cpu") as server:
        return length_report(WorkloadReader(server, Path(folder), listener).read(name, source, rows))
