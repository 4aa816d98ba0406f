"""The use case behind ``autotune lengths``: tokenises a dataset in a separate process."""

from __future__ import annotations

from autotune.app.workload import WorkloadReader
from autotune.core.events import Listener
from autotune.core.length_report import LengthReport, length_report
from autotune.inspection.dataset import dataset_source
from autotune.inspection.machine import machine as inspect_machine
from autotune.inspection.model import model_source
from autotune.probing import JobServer
from autotune.probing.scratch import ScratchFolder
from autotune.trainers import find_trainer


def lengths(model: str, dataset: str, trainer: str, listener: Listener) -> LengthReport:
    """Return the distribution of a dataset's lengths; see :func:`autotune.lengths`."""
    name = find_trainer(trainer).name
    source, rows = model_source(model, "random"), dataset_source(dataset)
    inspect_machine("cpu")
    with ScratchFolder() as folder, JobServer("cpu") as server:
        return length_report(WorkloadReader(server, folder, listener).read(name, source, rows))
