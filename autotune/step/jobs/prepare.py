"""The job ``prepare``: profiles the model and the dataset and saves the tokenised rows, once per workload."""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from datasets import Dataset
from trl import ModelConfig

from autotune.core.files import written_atomically
from autotune.core.protocol import PrepareRequest
from autotune.core.workload import DatasetProfile, ModelProfile, ModelSource, Workload
from autotune.errors import InputError, UnreadError
from autotune.step.data.dataset import load_rows
from autotune.step.data.profile import dataset_profile, model_profile
from autotune.step.data.tokenize import covered, tokenized
from autotune.step.images.limits import image_limits
from autotune.step.images.sizes import image_column
from autotune.step.job import JobContext
from autotune.step.models.loading import check_weights, load_config, load_processor
from autotune.step.models.peft import check_peft
from autotune.step.trainers import Adapter, adapter
from autotune.trainers import find_trainer
from autotune.units import format_bytes


def prepare(request: PrepareRequest, context: JobContext) -> Workload:
    """Read the model, load and tokenise the dataset and the rows to evaluate on, save both, and return the profiles.

    Raises:
        InputError: the model, the dataset or the PEFT configuration cannot be used.
        UnreadError: the disk has no room for the rows' images, or the rows to evaluate on are in another format.
    """
    known = adapter(request.trainer)
    config, processor, model = _read_model(request.model, known, context.folder)
    if request.peft:
        check_peft(request.peft, config)

    def read(asked: PrepareRequest) -> DatasetProfile:
        loaded = load_rows(find_trainer(asked.trainer), asked.dataset, processor, asked.model, context.folder)
        if not asked.only_lengths and image_column(loaded.rows) is not None:
            _check_space(loaded.rows, Path(asked.tokenized_directory).parent, asked.dataset.name)
        rows, dropped = covered(tokenized(asked, config, processor, loaded, context.folder), asked)
        profile = dataset_profile(asked, loaded, rows)
        if not profile.documents.tokens:
            raise InputError(
                f"No row of {asked.dataset.name} has a token.",
                hint=f"Check that its texts are not empty, and that the tokenizer of {asked.model.name} knows them.",
            )
        if not asked.only_lengths:
            with written_atomically(Path(asked.tokenized_directory)) as part:
                rows.save_to_disk(str(part))
        elif profile.images is not None:
            limits = image_limits(loaded.rows, processor, asked.dataset.name)
            profile = replace(profile, images=replace(profile.images, limits=limits))
        return replace(profile, dropped=dropped)

    teacher = _teacher(request.teacher, request, config, context.folder) if request.teacher is not None else None
    dataset = read(request)
    workload = Workload(
        trainer=request.trainer,
        model_source=request.model,
        dataset_source=request.dataset,
        model=model,
        dataset=dataset,
        rollouts=request.rollouts,
        absent=absent_entries(known),
        teacher_source=request.teacher,
        teacher=teacher,
    )
    if request.evaluation is None:
        return workload
    evaluation = read(replace(request, dataset=request.evaluation, tokenized_directory=request.evaluation_directory))
    if evaluation.format != dataset.format:
        # By the first row to train on, TRL decides which tokens the loss counts of both.
        raise UnreadError(
            f"The rows to train on, {request.dataset.name}, are in the format {dataset.format}, and those to evaluate "
            f"on, {request.evaluation.name}, in {evaluation.format}: TRL may take both, and autotune reads one format.",
            hint="Write both in one format.",
        )
    if (evaluation.images is None) != (dataset.images is None):
        pictured, plain = (dataset, evaluation) if evaluation.images is None else (evaluation, dataset)
        raise InputError(
            f"{pictured.name} has images, and {plain.name} has none.",
            hint="TRL collates the rows to evaluate on as those to train on: give both with images, or both without.",
        )
    return replace(workload, evaluation_source=request.evaluation, evaluation=evaluation)


def _teacher(source: ModelSource, request: PrepareRequest, student: Any, folder: Path) -> ModelProfile:
    """Return the profile of the teacher.

    Raises:
        InputError: it cannot be read, or TRL would refuse it with the trained model.
    """
    config, _, profile = _read_model(source, adapter(request.trainer), folder)
    own, wanted = (each.get_text_config().vocab_size for each in (config, student))
    if own != wanted:
        # DistillationTrainer.__init__ compares the same fields.
        raise InputError(
            f"The teacher {source.name} has a vocabulary of {own:,} tokens, and {request.model.name} one of "
            f"{wanted:,}: TRL compares the two models' distributions over all tokens.",
            hint="Take a teacher with the same tokenizer and vocab_size; for others TRL has GOLD, which autotune does "
            "not know.",
        )
    return profile


def _check_space(rows: Dataset, folder: Path, name: str) -> None:
    """Check that the disk of a folder has room for a copy of rows with their images.

    Raises:
        UnreadError: it has not.
    """
    try:
        # With the files that save_to_disk embeds.
        size = rows._estimate_nbytes()
    except OSError:
        # The message on images that cannot be read names the row.
        return
    free = shutil.disk_usage(folder).free
    if size > free:
        raise UnreadError(
            f"{name} has about {format_bytes(size)} with its images, which are copied to {folder}, and the disk there "
            f"has {format_bytes(free)} left.",
            hint="Free some space, name a folder on a larger disk (TMPDIR; for probes, the output directory), or read "
            "fewer rows, as with --split.",
        )


def _read_model(source: ModelSource, known: Adapter, folder: Path) -> tuple[Any, Any, ModelProfile]:
    """Return the configuration of a model, its tokenizer or processor, and its profile.

    Raises:
        InputError: one of them cannot be read, or there are no weights where some are to be loaded.
    """
    config = load_config(source, known.head)
    processor = load_processor(source, known.processor)
    profile = model_profile(source, config, processor, folder)
    if source.init == "pretrained":
        check_weights(Path(source.name))
    if source.init == "pretrained" and profile.has_weights is False:
        raise InputError(
            f"{source.name} has no weights to load.",
            hint="Use --init random: memory and speed do not depend on the weights' values.",
        )
    return config, processor, profile


def absent_entries(known: Adapter) -> tuple[str, ...]:
    """Return the plan entries of a trainer's techniques for which the installed TRL's configurations have no field."""
    has = {"args": _fields(known.config), "model": _fields(ModelConfig)}
    entries = {entry for technique in find_trainer(known.name).techniques for entry in technique.writes}
    paths = ((entry, entry.split(".")) for entry in sorted(entries))
    return tuple(entry for entry, path in paths if path[0] in has and path[1] not in has[path[0]])


def _fields(config: type[Any]) -> set[str]:
    return {field.name for field in dataclasses.fields(config)}
