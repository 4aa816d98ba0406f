"""Finds the model and the rows that a configuration names, in the terms in which a workload is read."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autotune.app.check.asked import Asked
from autotune.app.check.mixture import Loaded, of_entries
from autotune.app.check.task import UnreadError
from autotune.app.user_plan import reading_of
from autotune.core.configuration import MIXTURE, MODEL_CONFIG, Configuration, ReadCommand
from autotune.core.plan import NO_EVALUATION
from autotune.core.workload import DatasetSource, ModelSource
from autotune.errors import InputError
from autotune.inspection.dataset import dataset_source, evaluation_source
from autotune.inspection.model import model_source
from autotune.inspection.paths import exists, is_file, local_path

_HINT = "Name a dataset with --dataset."
_TRAIN, _TEST = "train", "test"


@dataclass(frozen=True)
class Sources:
    """The model and the rows of a training.

    Attributes:
        evaluation: the rows that training is evaluated on, or None.
        streams: whether TRL streams the rows, which are read whole here.
    """

    model: ModelSource
    dataset: DatasetSource
    evaluation: DatasetSource | None
    streams: bool = False


def sources(asked: Asked, read: ReadCommand, config: Configuration) -> Sources:
    """Return the model and the rows that a configuration names, or the check instead.

    Raises:
        UnreadError: it says something of the rows that is not read.
        InputError: there is none, or it cannot be used.
    """
    model = read.configurations[MODEL_CONFIG].values
    name = asked.model or model.get("model_name_or_path")
    if not isinstance(name, str):
        raise InputError("The configuration names no model.", hint="Write model_name_or_path, or give --model.")
    source = replace(model_source(name, "random"), revision=str(model.get("model_revision") or "main"))
    rows = _rows(asked, read)
    if rows.streams:
        _check_streamed(rows.source, config)
    evaluates = config.values.get("eval_strategy", NO_EVALUATION) != NO_EVALUATION
    reading, evaluation = reading_of(config), _evaluated(rows) if evaluates else None
    return Sources(
        source,
        replace(rows.source, reading=reading),
        evaluation and replace(evaluation, reading=reading),
        rows.streams,
    )


def _rows(asked: Asked, read: ReadCommand) -> Loaded:
    """Return the rows to train on, as TRL's scripts find them."""
    script = read.script
    train, test = (str(script.get(f"dataset_{name}_split") or name) for name in (_TRAIN, _TEST))
    if asked.dataset is not None:
        source = dataset_source(asked.dataset)
        # A file has one split: training is taken to be evaluated on rows like those.
        return Loaded(source, None if source.data_files is not None else test)
    mixture = read.configurations[MIXTURE].values
    items = mixture.get("datasets") or []
    if isinstance(items, list) and items:
        size, streams = mixture.get("test_split_size"), bool(mixture.get("streaming"))
        _check_splits(train, test, parted=size is not None)
        return Loaded(of_entries(items, size, streams=streams), None if size is not None else test, streams, mixed=True)
    name = script.get("dataset_name")
    if not isinstance(name, str):
        raise InputError(
            "The configuration names no dataset.", hint="Write datasets or dataset_name, or give --dataset."
        )
    if is_file(name):
        raise InputError(
            f"dataset_name is the file {name}, which TRL does not find: it takes hub ids and directories by it.",
            hint="Write datasets, with path (json, csv or parquet) and data_files.",
        )
    streams = bool(script.get("dataset_streaming"))
    config = script.get("dataset_config")
    if config is not None:
        local_path(name, "dataset", frozenset())
        entry = {"path": name, "name": config, "split": train}
        return Loaded(DatasetSource(f"{name} ({config})", name, split=train, mixture=(entry,)), test, streams)
    return Loaded(replace(dataset_source(name), split=train), test, streams)


def _check_splits(train: str, test: str, *, parted: bool) -> None:
    """Check that the splits have names that TRL gives them, whatever those of the datasets in a mixture are."""
    known = (_TRAIN, _TEST) if parted else (_TRAIN,)
    if train not in known:
        raise InputError(
            f"dataset_train_split is {train}, and datasets make the split {' and '.join(known)} alone: TRL ends with a "
            "KeyError.",
            hint="Write split in each entry of datasets.",
        )
    if parted and test != _TEST:
        raise InputError(f"dataset_test_split is {test}, and test_split_size makes the split {_TEST}.")


def _check_streamed(rows: DatasetSource, config: Configuration) -> None:
    """Check what transformers and TRL refuse where the rows to train on are streamed.

    Raises:
        UnreadError: they are not on this machine.
        InputError: they refuse it.
    """
    if not all(exists(place) for place in rows.places):
        raise UnreadError("The lengths of rows that are streamed from elsewhere are not known.", hint=_HINT)
    steps = config.values.get("max_steps")
    if not isinstance(steps, int) or steps <= 0:
        raise InputError(
            "With streaming, transformers cannot count the rows of an epoch, and ends without max_steps.",
            hint="Write max_steps.",
        )
    if config.values.get("precompute_ref_log_probs"):
        raise InputError("TRL refuses precompute_ref_log_probs with rows that are streamed.")


def _evaluated(rows: Loaded) -> DatasetSource:
    source, split = rows.source, rows.test
    if split is None:
        # A random part of the rows is kept for it, which may hold the longest.
        return replace(source, name=f"{source.name} (a part of it)")
    if rows.mixed or source.data_files is not None:
        raise InputError(
            f"Training is evaluated on the split {split}, which datasets have not: TRL ends with a KeyError.",
            hint="Write test_split_size, or dataset_name with a directory that has both; or leave out eval_strategy.",
        )
    if source.mixture:
        mixture = tuple({**item, "split": split} for item in source.mixture)
        return replace(source, name=f"{source.name} ({split})", split=split, mixture=mixture)
    found = evaluation_source(source.name, None, split)
    assert found is not None
    return found
