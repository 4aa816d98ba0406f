"""Loads the user's dataset and checks that the trainer can use it with the model's tokenizer."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset, load_dataset, load_dataset_builder
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
from datasets.table import CastError
from huggingface_hub.errors import HfHubHTTPError
from transformers import ProcessorMixin
from trl import DatasetMixtureConfig, get_dataset
from trl.data_utils import is_conversational, is_conversational_from_value
from trl.scripts.utils import DatasetConfig

from autotune.core.files.nested import mapping
from autotune.core.files.scratch import is_temporary
from autotune.core.workload import CHAT_TEMPLATE, UNUSED_COLUMNS, DatasetSource, ModelSource
from autotune.errors import InputError, UnreadError, first_line, one_line
from autotune.inspection.dataset import check_file
from autotune.inspection.rows import nested_rows_hint
from autotune.step.data.columns import check_complete, check_numbers, with_token_lists
from autotune.step.data.remarks import is_written_messages
from autotune.step.hub import loading_error
from autotune.step.images.messages import check_no_images
from autotune.step.images.sizes import COLUMNS, has_images, image_column, image_feature, image_sizes
from autotune.step.job import lacks_space
from autotune.step.models.loading import tokenizer_of
from autotune.step.trainers import find_adapter
from autotune.trainers.base import Trainer
from autotune.trainers.declared import DatasetFormat

# datasets/splits.py and datasets/arrow_reader.py: "Unknown split "test". Should be one of ['train']."
_UNKNOWN_SPLIT = "Unknown split"
# datasets/builder.py: "Config name is missing.\nPlease pick one among the available configs: ['en', 'fr']", and
# "BuilderConfig 'de' not found. Available: ['en', 'fr']".
_CONFIGURATIONS = re.compile(r"(?:available configs|not found\. Available): \[([^]]*)\]")
_DENIED = (errno.EACCES, errno.ENOTDIR, errno.EPERM, errno.EROFS)
_SKIP_PREPARE = "skip_prepare_dataset"
_MESSAGE_COLUMNS = ("prompt", "chosen", "rejected", "completion", "messages")
"""Columns that may hold messages. ``trl.data_utils.is_conversational`` inspects only the first of a row's columns in a
set's order: if some are text, its result differs between processes."""
_SHARE_GPT = ("conversations",)
SPLIT_HINT = (
    "TRL takes the common beginning of chosen and rejected as the prompt: in no row may one be empty, or their first "
    "messages differ."
)
_NAME_SPLIT = "Name one with --split or --eval-split, or in the configuration."


@dataclass(frozen=True)
class LoadedRows:
    """The user's dataset before tokenising.

    Attributes:
        format: the first of the trainer's formats whose columns the dataset has.
    """

    rows: Dataset
    format: DatasetFormat


def load_rows(trainer: Trainer, source: DatasetSource, processor: Any, model: ModelSource) -> LoadedRows:
    """Load a dataset and check that a trainer can use it with this model's tokenizer.

    Raises:
        InputError: the dataset is missing or broken, has unusable images, no row or no usable column, or the tokenizer
            lacks a token or template for it.
        UnreadError: the hub cannot be reached, or the dataset is read in a way that autotune does not support.
    """
    with _named_errors(source):
        rows = _load(source)
    if not len(rows):
        raise InputError(f"{Path(source.name)} has no rows.", hint="Give a dataset that has some.")
    if source.prepared:
        columns = find_adapter(trainer.name).columns
        return LoadedRows(rows, DatasetFormat("+".join(columns), columns, tokenized=True))
    _check_text(source, rows)
    check_no_images(source, rows, [name for form in trainer.formats for name in form.columns])
    loaded = LoadedRows(rows, _format(trainer, source, rows))
    _check_images(trainer, source, rows, loaded.format, processor)
    _check_prepared(source, rows)
    # TRL takes a row without messages for text, if there is such a column.
    falls_back = not loaded.format.text and any(form.named_by for form in _formats(trainer, source, rows))
    used = (*(() if falls_back else loaded.format.columns), *trainer.optional_columns)
    for column in (name for name in used if name in rows.column_names):
        check_complete(source, rows, column)
    of_tokens = (*(loaded.format.columns if loaded.format.tokenized else ()), *trainer.of_tokens)
    for column in (name for name in (*of_tokens, *trainer.masks) if name in rows.column_names):
        rows = with_token_lists(source, rows, column, flags=column in trainer.masks)
    loaded = replace(loaded, rows=rows)
    for column in (*loaded.format.flags, *(name for name in trainer.optional_columns if name in rows.column_names)):
        check_numbers(source, rows, column)
    _check_tokenizer(trainer, loaded, processor, source, model)
    return loaded


def _load(source: DatasetSource) -> Dataset:
    if source.mixture:
        mixture = DatasetMixtureConfig(datasets=[DatasetConfig(**item) for item in source.mixture])
        rows = get_dataset(mixture)["train"]
    else:
        rows = load_dataset(
            source.path,
            source.config,
            data_files=source.data_files,
            split=source.split,
            cache_dir=_cache_folder(source.data_files),
        )
        empty = [name for name, split in (rows.info.splits or {}).items() if not split.num_examples]
        if empty and source.all_splits:
            raise InputError(
                f"The split {empty[0]} of {source.name} has no rows: TRL loads all splits of dataset_name, and fails.",
                hint=f"Remove its file, or write datasets: [{{path: {source.path}, split: {source.split}}}].",
            )
    if source.test_size is not None:
        # Checks that the split is possible; its rows are random.
        rows.train_test_split(test_size=source.test_size)
    return rows


def _cache_folder(file: str | None) -> str | None:
    """Return the folder for what datasets makes of a file; None: its cache, which it never empties.

    What it makes of a temporary file is kept with the file, and ends with it.
    """
    return str(Path(file).parent / "datasets") if file is not None and is_temporary(Path(file)) else None


@contextmanager
def _named_errors(source: DatasetSource) -> Iterator[None]:
    """Raise an error that names the dataset where it cannot be loaded."""
    try:
        yield
    except (DatasetNotFoundError, FileNotFoundError, ConnectionError, HfHubHTTPError) as error:
        message = f"The dataset {source.name} cannot be loaded: {first_line(error).removesuffix('.')}."
        raise loading_error(error, message, "Check the name; where there is no network, give a local file.") from error
    except DatasetGenerationError as error:
        if lacks_space(error):
            cache = datasets.config.HF_DATASETS_CACHE
            hint = "Free some, or set HF_DATASETS_CACHE to another directory."
            raise InputError(f"There is no space left for the cache of datasets, {cache}.", hint=hint) from error
        _check_all_lines(source)
        cause = error.__cause__ or error
        why = one_line(cause) or first_line(cause)
        if isinstance(cause, CastError):
            why = f"its columns differ: {cause.details().removesuffix('.')}."
        raise InputError(f"The dataset {source.name} cannot be read: {why}") from error
    except OSError as error:
        if error.errno not in _DENIED:
            raise
        hint = "If that is in the cache of datasets, set HF_DATASETS_CACHE to a directory that can be written."
        raise InputError(f"The dataset {source.name} cannot be loaded: {one_line(error)}.", hint=hint) from error
    # EOFError: a compressed file was cut off. StopIteration: a file is empty. RuntimeError: a dataset is a script.
    # AttributeError: of the rows of a mixture, some have mappings where others have null (``_align_features``).
    except (ValueError, TypeError, AttributeError, EOFError, RuntimeError, StopIteration) as error:
        if _UNKNOWN_SPLIT in str(error):
            splits = first_line(error).partition("Should be one of ")[2].strip(".[]").replace("'", "")
            raise InputError(
                f"The dataset {source.name} has no split {source.split!r}.", hint=f"It has {splits}. {_NAME_SPLIT}"
            ) from error
        if (configurations := _CONFIGURATIONS.search(str(error))) is not None:
            names = configurations[1].replace("'", "")
            problem = "several configurations" if source.config is None else f"no configuration {source.config!r}"
            hint = f"It has {names}. Name one with --dataset-config, or with dataset_config in the configuration."
            raise InputError(f"The dataset {source.name} has {problem}.", hint=hint) from error
        _check_all_lines(source)
        raise InputError(f"The dataset {source.name} cannot be loaded: {first_line(error)}") from error


def _check_all_lines(source: DatasetSource) -> None:
    """Raise an error for the first broken line of the files."""
    files = [] if source.data_files is None else [source.data_files]
    if not source.mixture and Path(source.path).is_dir():
        with suppress(ValueError, RuntimeError):  # its splits are in several formats, or it is a script
            configured = load_dataset_builder(source.path, source.config).config
            files = configured.data_files.get(source.split.partition("[")[0], [])
    for file in map(Path, files):
        check_file(file, lines=True)


def _formats(trainer: Trainer, source: DatasetSource, rows: Dataset) -> list[DatasetFormat]:
    """Return the trainer's formats whose columns the rows have, with the names that the user gave them."""
    named = ((form, source.reading.get(form.named_by)) for form in trainer.formats)
    forms = (form if name is None else replace(form, columns=(str(name),)) for form, name in named)
    return [form for form in forms if set(form.columns).issubset(rows.column_names)]


def _format(trainer: Trainer, source: DatasetSource, rows: Dataset) -> DatasetFormat:
    found, row = _formats(trainer, source, rows), _first_row(rows)
    # TRL reads text where the first row has no messages, and ignores conversations with role and content.
    with_value = [form for form in found if form.text or row[form.columns[0]] is not None] or found
    empty = not row.get(_SHARE_GPT[0])
    read = (form for form in with_value if form.columns != _SHARE_GPT or empty or is_conversational_from_value(row))
    if (first := next(read, None)) is not None:
        return first
    columns = set(rows.column_names)
    given = ((form, source.reading.get(form.named_by)) for form in trainer.formats)
    renamed = "".join(
        f"; {form.named_by} names {name} in place of {form.columns[0]}" for form, name in given if name is not None
    )
    advice = next((text for names, text in trainer.advice.items() if columns.issuperset(names)), "")
    nested = nested_rows_hint(row) if len(rows) == 1 else ""
    raise InputError(
        f"{source.name} lacks columns that {trainer.label} needs: it has {', '.join(rows.column_names)}.",
        hint=" ".join(filter(None, (f"It needs {trainer.wanted_columns}{renamed}.", advice or nested))),
    )


def _check_text(source: DatasetSource, rows: Dataset) -> None:
    """Check that the first row is UTF-8: ``datasets`` decodes text only when a row is read.

    Raises:
        InputError: it is not UTF-8.
    """
    try:
        _first_row(rows)
    except UnicodeDecodeError as error:
        _check_all_lines(source)
        raise InputError(f"Row 1 of {source.name} cannot be read: {error}.", hint="Write the rows in UTF-8.") from error


def _first_row(rows: Dataset) -> dict[str, Any]:
    """Return the first row without its images, which may be broken."""
    names = [name for name in rows.column_names if name not in COLUMNS]
    row: dict[str, Any] = rows.select_columns(names)[0] if names else {}
    return row


def _check_prepared(source: DatasetSource, rows: Dataset) -> None:
    # With images, TRL never prepares them.
    if mapping(source.reading.get("dataset_kwargs")).get(_SKIP_PREPARE) and image_column(rows) is None:
        raise UnreadError(
            f"{source.name} is read with {_SKIP_PREPARE}: TRL neither cuts nor packs its rows, whatever max_length and "
            "packing are. For rows of tokens, max_length: null and packing: false do the same."
        )


def _no_text(trainer: Trainer, source: DatasetSource, first: Mapping[str, Any], columns: Sequence[str]) -> InputError:
    """Return the error for a first row without text that the trainer tokenises."""
    where = f"in {' and '.join(columns)}"
    if any(is_written_messages(first[name]) for name in columns):
        return InputError(
            f"Row 1 of {source.name} holds messages written as text {where}.",
            hint="Write the rows as JSON lines or Parquet.",
        )
    return InputError(
        f"Row 1 of {source.name} holds neither text nor messages {where}.",
        hint=f"{trainer.label} needs {trainer.wanted_columns}; a message has role and content.",
    )


def _check_tokenizer(
    trainer: Trainer, loaded: LoadedRows, processor: Any, source: DatasetSource, model: ModelSource
) -> None:
    tokenizer, end = tokenizer_of(processor), source.reading.get("eos_token")
    for name, token in (("eos_token", end), ("pad_token", source.reading.get("pad_token") or None)):
        if token is not None and token not in tokenizer.get_vocab():
            raise InputError(
                f"{name} is {token}, which is not a token of {model.name}: TRL fails with a ValueError.",
                hint=f"Give a token of its tokenizer, or leave {name} out.",
            )
    if not any((tokenizer.pad_token, tokenizer.eos_token, end, source.reading.get("pad_token"))):
        raise InputError(
            f"The tokenizer of {model.name} has neither a pad_token nor an eos_token, and TRL needs one.",
            hint="Name one in its tokenizer_config.json.",
        )
    if loaded.format.tokenized:
        return
    first = _first_row(loaded.rows)
    conversational = _is_conversational(trainer, loaded, source)
    columns = [name for name in loaded.format.columns if name not in loaded.format.flags]
    if conversational:
        if getattr(processor, "chat_template", None) is None and CHAT_TEMPLATE not in source.reading:
            raise InputError(
                f"{source.name} is conversational and the tokenizer of {model.name} has no chat template.",
                hint="Use the tokenizer of a chat model, or a dataset of text.",
            )
        if loaded.format.splits and first["chosen"][0] != first["rejected"][0]:
            raise InputError(f"The answers in row 1 of {source.name} begin with different messages.", hint=SPLIT_HINT)
    elif not loaded.format.text or not all(isinstance(first[name], str) for name in columns):
        raise _no_text(trainer, source, first, columns)
    if tokenizer.eos_token is None and end is None and (trainer.generates or not conversational):
        use = "with which a completion ends" if trainer.generates else "which TRL adds to every text"
        raise InputError(
            f"The tokenizer of {model.name} has no end-of-sequence token, {use}.",
            hint='Set "eos_token" in its tokenizer_config.json.',
        )


def _is_conversational(trainer: Trainer, loaded: LoadedRows, source: DatasetSource) -> bool:
    """Whether rows hold messages.

    Raises:
        InputError: only some of the columns do, or there is a prompt without its completion.
    """
    first, columns, pictured = _first_row(loaded.rows), loaded.format.columns, image_column(loaded.rows) is not None
    # If the model generates, TRL inspects the prompt alone, unless there are images.
    alone = trainer.generates and not pictured
    inspected = [name for name in (columns if alone else _MESSAGE_COLUMNS) if name in first]
    converted = [
        name for form in trainer.formats if form.columns == _SHARE_GPT for name in form.columns if name in first
    ]
    without = next((name for name in (*inspected, *converted) if first[name] == []), None)
    if without is not None:
        raise InputError(
            f"Row 1 of {source.name} has an empty list in {without}, whose first message TRL reads.",
            hint=f"Complete the row, or remove {without} from all rows.",
        )
    kinds = {name: is_conversational({name: first[name]}) for name in inspected}
    # TRL's collators of images treat each column separately.
    if trainer.generates or not pictured:
        # TRL renames these to messages before it inspects a row.
        kinds |= dict.fromkeys(converted, True) if is_conversational_from_value(first) else {}
        if "prompt" in kinds and "prompt" not in columns and "completion" not in kinds:
            raise InputError(
                f"{source.name} has the column prompt, and no completion: TRL needs both, or neither.",
                hint="Remove or rename prompt.",
            )
        texts, messages = (" and ".join(name for name in kinds if kinds[name] is kind) for kind in (False, True))
        if texts and messages:
            raise InputError(
                f"{source.name} has text in {texts}, and messages in {messages}: TRL reads all columns of a row as"
                " text, or all as messages.",
                hint="Write all of them as text or all as messages, or remove those of one kind.",
            )
    return any(kinds.values())


def _check_images(trainer: Trainer, source: DatasetSource, rows: Dataset, form: DatasetFormat, processor: Any) -> None:
    """Check that a trainer can be probed on the images of rows, if there are any.

    Args:
        form: the format of the rows.
        processor: the model's processor, or its tokenizer if it has none.

    Raises:
        InputError: TRL cannot train on these images.
        UnreadError: autotune supports this trainer on text only.
    """
    column = image_column(rows)
    if column is None:
        return
    found = f"{source.name} has images (column {column}), and"
    if not trainer.takes_images:
        raise UnreadError(
            f"{found} autotune plans and measures {trainer.label} on rows of text alone.",
            hint=f"Give rows without the column {column}, if only their text is to be trained on.",
        )
    if trainer.generates and set(COLUMNS).issubset(rows.column_names):
        raise UnreadError(
            f"{source.name} has image and images: TRL generates with images alone, and autotune reads one column.",
            hint="Leave image out.",
        )
    has_processor = isinstance(processor, ProcessorMixin)
    # TRL takes such rows for text, unless its trainer refuses the column of a model without a processor.
    if not has_images(rows) and (has_processor or trainer.generates):
        raise UnreadError(
            f"No row of {source.name} has an image in its column {column}, and autotune takes only rows with images "
            "there.",
            hint="Leave the column out, for rows of text.",
        )
    if not has_processor:
        raise InputError(
            f"{found} the model has no processor of images.",
            hint="Give a vision-language model, with its processor_config.json or preprocessor_config.json.",
        )
    keeps_text = bool(form.named_by) and source.reading.get(UNUSED_COLUMNS) is False
    if not form.with_images and not keeps_text:
        # TRL's trainer drops all other columns (``_set_signature_columns_if_needed``), a column of text included.
        accepted = " or ".join(each.name for each in trainer.formats if each.with_images)
        raise InputError(
            f"{found} TRL trains {trainer.label} on images only with {accepted}, and its rows have {form.name}.",
            hint="Put them into that form.",
        )
    if image_feature(rows, column) is None:
        kind, paths = (
            ("a list of images", "lists of the paths of their files")
            if column == "images"
            else ("an image", "the paths of their files")
        )
        raise InputError(
            f"{found} the values of that column are not images: datasets reads {rows.features[column]}.",
            hint=f"Cast it with datasets to {kind} (datasets.Image) and save the rows as Parquet, or give {paths}.",
        )
    # TRL's trainer decodes those of the first row where it is built; others are checked as they are counted.
    next(image_sizes(rows.select([0]), processor.image_processor, source.name))
