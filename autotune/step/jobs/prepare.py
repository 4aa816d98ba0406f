"""The job ``prepare``: profiles the model and the dataset and saves the tokenised rows, once per workload."""

from __future__ import annotations

import dataclasses
import shutil
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import trl
from datasets import Dataset
from jinja2 import TemplateError
from trl import ModelConfig

from autotune.core.files.atomic import written_atomically
from autotune.core.jobs.protocol import PrepareRequest
from autotune.core.plan import TrainingPlan
from autotune.core.workload import CHAT_TEMPLATE, DatasetProfile, DroppedRows, ModelProfile, ModelSource, Workload
from autotune.errors import InputError, UnreadError, one_line
from autotune.step.data.dataset import SPLIT_HINT, LoadedRows, load_rows
from autotune.step.data.profile import dataset_profile, model_profile
from autotune.step.images.limits import image_limits
from autotune.step.images.sizes import image_column
from autotune.step.job import JobContext
from autotune.step.models.loading import check_weights, load_config, load_processor, model_class, tokenizer_of
from autotune.step.models.peft import check_peft
from autotune.step.models.shrink import MIN_BUILT_LAYERS, shrunken_model
from autotune.step.objects import config as configuration
from autotune.step.rows import distribution, extreme_values
from autotune.step.trainers import Adapter, find_adapter
from autotune.trainers import find_trainer
from autotune.trainers.prompts import PROMPT
from autotune.units import format_bytes

_TRL = Path(trl.__file__).parent
"""The directory of TRL's code."""
_TEMPLATE_CODE = "<template>"
"""File name in tracebacks of a template without a file (``Environment.from_string`` of Jinja). Its code may raise any
error, such as a TypeError for null in text."""
_MAP_FILE = "datasets/arrow_dataset.py"
"""The file that calls TRL's functions on rows."""
_MIN_PROMPTS = 2
"""Minimum number of prompts that the coverage must keep."""
_MAX_NAMED = 10
"""Maximum number of dropped rows that are named; the others are counted."""


def prepare(request: PrepareRequest, context: JobContext) -> Workload:
    """Read the model, load and tokenise the dataset and the rows to evaluate on, save both, and return the profiles.

    Raises:
        InputError: the model, the dataset or the PEFT configuration cannot be used.
        UnreadError: the disk has no room for the rows' images, or the rows to evaluate on are in another format.
    """
    adapter = find_adapter(request.trainer)
    config, processor, model = _read_model(request.model, adapter, context.folder)
    if request.peft:
        check_peft(request.peft, config)

    def read(source: PrepareRequest) -> DatasetProfile:
        loaded = load_rows(find_trainer(source.trainer), source.dataset, processor, source.model)
        if not source.only_lengths and image_column(loaded.rows) is not None:
            _check_space(loaded.rows, Path(source.tokenized_directory).parent, source.dataset.name)
        rows, dropped = without_longest_prompts(tokenized(source, config, processor, loaded, context.folder), source)
        _check_embedded(source, loaded, rows, model, processor)
        profile = dataset_profile(source, loaded, rows)
        if not profile.documents.tokens:
            raise InputError(
                f"No row of {source.dataset.name} has a token.",
                hint=f"Check that its texts are not empty, and that {source.model.name} has the right tokenizer.",
            )
        if not source.only_lengths:
            with written_atomically(Path(source.tokenized_directory)) as part:
                rows.save_to_disk(str(part))
        elif profile.images is not None:
            limits = image_limits(loaded.rows, processor, source.dataset.name)
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
        absent=absent_entries(adapter),
        teacher_source=request.teacher,
        teacher=teacher,
    )
    if request.evaluation is None:
        return workload
    evaluation = read(replace(request, dataset=request.evaluation, tokenized_directory=request.evaluation_directory))
    if evaluation.format != dataset.format:
        # TRL selects the tokens that the loss counts in both datasets by the first training row.
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
        InputError: it cannot be read, or TRL would refuse it for this student.
    """
    config, _, profile = _read_model(source, find_adapter(request.trainer), folder)
    size, expected = (each.get_text_config().vocab_size for each in (config, student))
    if size != expected:
        # DistillationTrainer.__init__ compares the same fields.
        raise InputError(
            f"The teacher {source.name} has a vocabulary of {size:,} tokens, and {request.model.name} one of "
            f"{expected:,}: TRL compares the two models' distributions over all tokens.",
            hint="Take a teacher with the same tokenizer and vocab_size; for others TRL has GOLD, which autotune does "
            "not support.",
        )
    return profile


def _check_embedded(
    request: PrepareRequest, loaded: LoadedRows, rows: Dataset, model: ModelProfile, processor: Any
) -> None:
    """Check that the model has an embedding for each token of the rows.

    Raises:
        InputError: an embedding is missing.
    """
    # Image placeholders may have no embedding: the model replaces them.
    if request.only_lengths or not request.model.tokenizer or image_column(loaded.rows) is not None:
        return
    columns = [name for name in find_adapter(request.trainer).columns if name.endswith("_ids")]
    # If the trainer generates completions, only the lengths of known completions are used.
    smallest, largest = extreme_values(rows, [PROMPT] if find_trainer(request.trainer).generates else columns)
    if smallest < 0 or largest >= model.vocabulary:
        worst = smallest if smallest < 0 else largest
        token = tokenizer_of(processor).convert_ids_to_tokens(worst) if worst > 0 else ""
        hint = "Use the model's own tokenizer, or resize its embeddings (resize_token_embeddings) and save both."
        raise InputError(
            f"{request.dataset.name} has the token id {worst:,}{f' ({token})' if token else ''}, and {model.name} has"
            f" embeddings for {model.vocabulary:,} tokens: training crashes on it.",
            hint="To leave a token out of the loss, change its label, not its id." if worst < 0 else hint,
        )


def _check_space(rows: Dataset, folder: Path, name: str) -> None:
    """Check that the disk of a folder has space for a copy of rows with their images.

    Raises:
        UnreadError: the space does not suffice.
    """
    try:
        # This includes the files that save_to_disk embeds.
        size = rows._estimate_nbytes()
    except OSError:
        # A later check reports unreadable images with their row.
        return
    free = shutil.disk_usage(folder).free
    if size > free:
        raise UnreadError(
            f"{name} has about {format_bytes(size)} with its images, which are copied to {folder}, and the disk there "
            f"has {format_bytes(free)} left.",
            hint="Free some space, name a folder on a larger disk (TMPDIR; for probes, the output directory), or read "
            "fewer rows, as with --split.",
        )


def tokenized(request: PrepareRequest, model_config: Any, processor: Any, loaded: LoadedRows, folder: Path) -> Dataset:
    """Return the dataset's rows with the columns of the trainer's adapter, neither truncated nor packed.

    TRL tokenises them: the real trainer is built around the smallest possible model. It has done so already in a
    training that runs.

    Raises:
        InputError: the chat template raises an error for a row, or TRL refuses the dataset or cannot read a row.
    """
    if request.dataset.prepared:
        return loaded.rows
    architecture = model_class(model_config)
    adapter = find_adapter(request.trainer)

    def small_model() -> Any:
        return shrunken_model(architecture, model_config, layers=MIN_BUILT_LAYERS)

    reading = request.dataset.reading
    plan = TrainingPlan(trainer=request.trainer, args={**adapter.tokenizing, **reading})
    arguments = configuration(plan, output_dir=str(folder), report_to="none", disable_tqdm=True, model_init_kwargs=None)
    try:
        with adapter.loading_models_from(small_model):
            trainer = adapter.trainer(
                model=small_model(),
                args=arguments,
                train_dataset=loaded.rows,
                processing_class=processor,
                **adapter.arguments(plan),
            )
        return adapter.tokenized(trainer, request.rollouts, request.dataset.name)
    except Exception as error:
        if isinstance(error, TemplateError) or _is_raised_in(error, _TEMPLATE_CODE):
            template = reading.get(CHAT_TEMPLATE) or f"of {request.model.name}"
            raise InputError(
                f"The chat template {template} refuses a row of {request.dataset.name}: {error}",
                hint="Look for messages whose roles or order the template does not know.",
            ) from error
        if _is_raised_in(error, _MAP_FILE) and not isinstance(error, (InputError, OSError)):
            form, row = loaded.format, _failed_row(error)
            # If TRL splits rows, its index counts the parts.
            which = "a row" if row is None or form.documents > 1 else f"row {row:,} (counted from 1)"
            hint = "Look for rows that differ from the first: null in messages, or numbers in place of text."
            if form.splits:
                hint = f"{hint} {SPLIT_HINT}"
            raise InputError(
                f"TRL cannot read {which} of {request.dataset.name}: "
                f"{type(error).__name__}: {one_line(error).removesuffix('.')}.",
                hint=hint,
            ) from error
        if isinstance(error, ValueError) and _TRL in Path(_frames(error)[-1].filename).parents:
            raise InputError(f"TRL refuses {request.dataset.name}: {one_line(error)}") from error
        raise


def _is_raised_in(error: Exception, code: str) -> bool:
    """Whether a file is in the traceback of an error."""
    return any(frame.filename.endswith(code) for frame in _frames(error))


def _frames(error: Exception) -> traceback.StackSummary:
    """Return the frames of an error, that in which it was raised last."""
    return traceback.extract_tb(error.__traceback__)


def _failed_row(error: Exception) -> int | None:
    """Return the number of the row, counted from 1, for which a function of TRL failed; None if unknown."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        # The loop of ``Dataset._map_single``; a function of several rows at once has the list of their numbers.
        if frame.f_code.co_name == "iter_outputs" and isinstance(number := frame.f_locals.get("i"), int):
            return number + 1
    return None


def without_longest_prompts(rows: Dataset, request: PrepareRequest) -> tuple[Dataset, DroppedRows | None]:
    """Return tokenised rows without the longest prompts, as the request's coverage allows, and the dropped rows.

    Keeps prompts up to the ``prompt_coverage`` quantile of lengths, which is the smallest length that at least this
    share of all prompts does not exceed. Prompts of equal length are kept or dropped together.

    Raises:
        InputError: too few are left.
    """
    share = request.rollouts.prompt_coverage
    if share >= 1:
        return rows, None
    prompts = find_adapter(request.trainer).lengths(rows)[:, find_trainer(request.trainer).parts.index("prompt")]
    max_tokens = distribution(prompts).quantile(share)
    kept_rows, dropped = np.flatnonzero(prompts <= max_tokens), np.flatnonzero(prompts > max_tokens)
    if not len(dropped):
        return rows, None
    if len(kept_rows) < _MIN_PROMPTS:
        raise InputError(
            f"--prompt-coverage {share:g} keeps {len(kept_rows)} of the {len(rows)} prompts of {request.dataset.name}.",
            hint="Give a larger share.",
        )
    longest = dropped[np.argsort(-prompts[dropped], kind="stable")][:_MAX_NAMED]
    named = zip((longest + 1).tolist(), prompts[longest].tolist(), strict=True)
    return rows.select(kept_rows), DroppedRows(len(dropped), max_tokens, tuple(named))


def _read_model(source: ModelSource, adapter: Adapter, folder: Path) -> tuple[Any, Any, ModelProfile]:
    """Return the configuration of a model, its tokenizer or processor, and its profile.

    Raises:
        InputError: one of them cannot be read, or there are no weights where some are to be loaded.
    """
    config = load_config(source, adapter.head)
    processor = load_processor(source, adapter.processor)
    profile = model_profile(source, config, processor, folder)
    if source.init == "pretrained":
        check_weights(Path(source.name))
        if profile.has_weights is False:
            raise InputError(
                f"{source.name} has no weights to load.",
                hint="Use --init random: memory and speed do not depend on the weights' values.",
            )
    return config, processor, profile


def absent_entries(adapter: Adapter) -> tuple[str, ...]:
    """Return the plan entries of a trainer's techniques for which the installed TRL's configurations have no field."""
    has = {"args": _fields(adapter.config), "model": _fields(ModelConfig)}
    entries = {entry for technique in adapter.specification.techniques for entry in technique.writes}
    paths = ((entry, entry.split(".")) for entry in sorted(entries))
    return tuple(entry for entry, path in paths if path[0] in has and path[1] not in has[path[0]])


def _fields(config: type[Any]) -> set[str]:
    return {field.name for field in dataclasses.fields(config)}
