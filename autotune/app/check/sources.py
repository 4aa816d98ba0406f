"""Finds the model and the rows that a configuration names, in the terms in which a workload is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from autotune.app.check.asked import Asked
from autotune.app.check.task import UnreadError
from autotune.core.configuration import MIXTURE, MODEL_CONFIG, SCRIPT_ARGUMENTS, Configuration, ReadCommand
from autotune.core.plan import NO_EVALUATION
from autotune.core.workload import DatasetSource, ModelSource
from autotune.errors import InputError
from autotune.inspection.dataset import BUILDERS, dataset_source, evaluation_source
from autotune.inspection.model import model_source

_HINT = "Name a dataset with --dataset."


@dataclass(frozen=True)
class Sources:
    """The model and the rows of a training.

    Attributes:
        evaluation: the rows that training is evaluated on, or None.
    """

    model: ModelSource
    dataset: DatasetSource
    evaluation: DatasetSource | None


def sources(asked: Asked, read: ReadCommand, config: Configuration) -> Sources:
    """Return the model and the rows that a configuration names, or the check instead.

    Raises:
        InputError: there is none, or it cannot be used.
    """
    model = read.configurations[MODEL_CONFIG].values
    name = asked.model or model.get("model_name_or_path")
    if not isinstance(name, str):
        raise InputError("The configuration names no model.", hint="Write model_name_or_path, or give --model.")
    source = replace(model_source(name, "random"), revision=str(model.get("model_revision") or "main"))
    rows, split = _rows(asked, read)
    evaluates = config.values.get("eval_strategy", NO_EVALUATION) != NO_EVALUATION
    return Sources(source, rows, _evaluated(rows, split) if evaluates else None)


def _rows(asked: Asked, read: ReadCommand) -> tuple[DatasetSource, str | None]:
    """Return the rows to train on, and the split to evaluate on; None where it is a part of the same rows."""
    scripts = (item.values for name, item in read.configurations.items() if name.endswith(SCRIPT_ARGUMENTS))
    script: Mapping[str, object] = next(scripts, {})
    test = str(script.get("dataset_test_split") or "test")
    if asked.dataset is not None:
        source = dataset_source(asked.dataset)
        # A file has one split: training is taken to be evaluated on rows like those.
        return source, None if source.data_files is not None else test
    mixture = read.configurations[MIXTURE].values
    items = mixture.get("datasets") or []
    if isinstance(items, list) and items:
        split = None if mixture.get("test_split_size") else test
        return _item(items, streams=bool(mixture.get("streaming"))), split
    name = script.get("dataset_name")
    if not isinstance(name, str):
        raise InputError(
            "The configuration names no dataset.", hint="Write datasets or dataset_name, or give --dataset."
        )
    _check_plain(script, ("dataset_config", "dataset_streaming"))
    return replace(dataset_source(name), split=str(script.get("dataset_train_split") or "train")), test


def _item(items: list[Any], *, streams: bool) -> DatasetSource:
    if len(items) > 1:
        raise UnreadError(f"A mixture of {len(items)} datasets is not read.", hint=_HINT)
    if streams:
        raise UnreadError("The lengths of rows that are streamed are not known.", hint=_HINT)
    item: Mapping[str, Any] = items[0]
    _check_plain(item, ("name", "data_dir", "fraction"))
    path, files = str(item.get("path")), item.get("data_files")
    if isinstance(files, list) and len(files) == 1:
        files = files[0]
    if files is not None and not isinstance(files, str):
        raise UnreadError("Several data_files are not read.", hint=_HINT)
    if (path in BUILDERS.values()) != (files is not None):
        raise UnreadError(f"datasets: path {path!r} with data_files {files!r} is not read.", hint=_HINT)
    source = dataset_source(files or path)
    return replace(source, split=str(item.get("split") or "train"))


def _check_plain(values: Mapping[str, Any], unread: tuple[str, ...]) -> None:
    set_here = next((name for name in unread if values.get(name)), None)
    if set_here is not None:
        raise UnreadError(f"A dataset with {set_here}={values[set_here]!r} is not read.", hint=_HINT)


def _evaluated(rows: DatasetSource, split: str | None) -> DatasetSource:
    if split is None:
        # A random part of the rows is kept for it, which may hold the longest.
        return replace(rows, name=f"{rows.name} (a part of it)")
    if rows.data_files is not None:
        raise InputError(
            f"Training is evaluated on the split {split}, which a file has not: TRL ends with a KeyError.",
            hint="Write test_split_size, or dataset_name with a directory that has both; or leave out eval_strategy.",
        )
    found = evaluation_source(rows.name, None, split)
    assert found is not None
    return found
