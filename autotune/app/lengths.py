"""The use case of ``autotune lengths``: tokenises a dataset in a separate process, and reports its lengths."""

from __future__ import annotations

from pathlib import Path

from autotune.app.arguments import LengthsArguments
from autotune.app.public import signature_from
from autotune.app.workload import WorkloadReader
from autotune.core.documents.length_report import LengthReport, length_report
from autotune.core.files.scratch import scratch_folder
from autotune.inspection.dataset import dataset_source
from autotune.inspection.machine import machine as inspect_machine
from autotune.inspection.model import model_source
from autotune.probing import JobServer
from autotune.trainers import find_trainer


@signature_from(LengthsArguments)
def lengths(args: LengthsArguments) -> LengthReport:
    """Tokenise a dataset as the trainer would, and return the distribution of its lengths.

    Raises:
        InputError: the model or the dataset cannot be used.
    """
    name = find_trainer(args.trainer).name
    source = model_source(args.model, "random")
    rows = dataset_source(args.dataset, args.split, args.dataset_config)
    inspect_machine("cpu")
    with scratch_folder() as folder, JobServer("cpu") as server:
        reader = WorkloadReader(server, Path(folder), args.listener, only_lengths=True)
        return length_report(reader.read(name, source, rows))
