"""Finds models, rows and reward functions that a configuration names, in the terms in which a workload is read."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autotune.confidential import MASK, hidden_values
from autotune.core.configuration import MIXTURE, MODEL_CONFIG, Configuration, ReadCommand
from autotune.core.nested import mapping
from autotune.core.workload import DatasetSource, Init, ModelSource
from autotune.errors import InputError, UnreadError
from autotune.inspection.dataset import BUILDERS, builder_of, check_split, dataset_source, evaluation_source
from autotune.inspection.model import model_source
from autotune.inspection.paths import exists, is_file
from autotune.trainers.distillation import TEACHER, TEACHER_REVISION
from autotune.trainers.prompts import NO_REWARD
from autotune.userconfig.fields import reading_of

_HINT = "Name a dataset with --dataset."
_TRAIN, _TEST = "train", "test"
# Fields of trl.scripts.utils.DatasetConfig that a plain dataset does not have.
_FURTHER = ("data_dir", "columns", "fraction")
_MOST_NAMED = 3
_FUNCTIONS, _REWARD_MODEL, _WEIGHTS = "reward_funcs", "reward_model_name_or_path", "reward_weights"


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


def sources(
    read: ReadCommand, config: Configuration, name: str | Path | None = None, dataset: str | Path | None = None
) -> Sources:
    """Return the model and the rows that a configuration names.

    Args:
        name, dataset: a model and rows in place of those; None: those of the configuration.

    Raises:
        UnreadError: it has a setting of the rows that is not supported.
        InputError: there is none, or it cannot be used.
    """
    model = read.configurations[MODEL_CONFIG].values
    own = model.get("model_name_or_path")
    named = str(name) if name else own
    if not isinstance(named, str):
        raise InputError(
            "The configuration names no model.", hint="Write model_name_or_path, or give `model` (`--model`)."
        )
    # The revision is of the configuration's own model, and that for loading wins (trl/scripts).
    loading = mapping(config.values.get("model_init_kwargs"))
    revision = loading.get("revision") or model.get("model_revision") if named == own else None
    if name is None:
        _check_unexpanded("model_name_or_path", named)
    source = replace(model_source(named, "random"), revision=str(revision or "main"))
    rows, test, streams = _rows(read, dataset, evaluates=config.evaluates)
    if streams:
        _check_streamed(rows, config)
    reading, evaluation = reading_of(config), _evaluated(rows, test) if config.evaluates else None
    return Sources(source, replace(rows, reading=reading), evaluation and replace(evaluation, reading=reading), streams)


def teacher_of(config: Configuration, init: Init = "random") -> ModelSource:
    """Return the teacher that a configuration names.

    Args:
        init: how its weights are initialised.

    Raises:
        InputError: it names none, and TRL ends without one; or it cannot be used.
    """
    named = config.values.get(TEACHER)
    if not isinstance(named, str):
        raise InputError("The configuration names no teacher.", hint=f"Write {TEACHER}.")
    _check_unexpanded(TEACHER, named)
    revision = str(config.values.get(TEACHER_REVISION) or "main")
    return replace(model_source(named, init, tokenizes=False), revision=revision)


def _check_unexpanded(key: str, place: str) -> None:
    """Check that a path of the configuration is one for transformers and datasets, which take a ``~`` for a name."""
    if place.startswith("~"):
        raise InputError(f"{key}: {place} is not found: TRL does not expand ~.", hint="Write the whole path.")


def _rows(read: ReadCommand, dataset: str | Path | None, *, evaluates: bool) -> tuple[DatasetSource, str | None, bool]:
    """Return the rows to train on, as TRL's scripts find them, the split to evaluate on, and whether TRL streams them.

    The split is None where it is a part of the same rows.
    """
    script = read.script
    train, test = (str(script.get(f"dataset_{name}_split") or name) for name in (_TRAIN, _TEST))
    if dataset is not None:
        source = dataset_source(dataset)
        # A file has one split: training is taken to be evaluated on rows like those.
        return source, None if source.data_files is not None else test, False
    mixture = read.configurations[MIXTURE].values
    items = mixture.get("datasets") or []
    if isinstance(items, list) and items:
        size, streams = mixture.get("test_split_size"), bool(mixture.get("streaming"))
        _check_splits(train, test, evaluates=evaluates, parted=size is not None)
        return of_entries(items, size, streams=streams), None, streams
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
    _check_unexpanded("dataset_name", name)
    check_split(train)
    config = script.get("dataset_config")
    source = dataset_source(name, train, None if config is None else str(config))
    return source, test, bool(script.get("dataset_streaming"))


def _check_splits(train: str, test: str, *, evaluates: bool, parted: bool) -> None:
    """Check that the splits have TRL's names, whatever the datasets in a mixture call them: it has no others."""
    known = (_TRAIN, _TEST) if parted else (_TRAIN,)
    if train not in known:
        raise InputError(
            f"dataset_train_split is {train}, and datasets make the split {' and '.join(known)} alone: TRL ends with a "
            "KeyError.",
            hint="Write split in each entry of datasets.",
        )
    if evaluates and not parted:
        raise InputError(
            f"Training is evaluated on the split {test}, which datasets have not: TRL ends with a KeyError.",
            hint="Write test_split_size, or dataset_name with a directory that has both; or leave out eval_strategy.",
        )
    if evaluates and test != _TEST:
        raise InputError(
            f"dataset_test_split is {test}, and test_split_size makes the split {_TEST}.",
            hint=f"Write dataset_test_split: {_TEST}, or leave it out.",
        )


def _check_streamed(rows: DatasetSource, config: Configuration) -> None:
    """Check for settings that transformers and TRL refuse with streamed rows.

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
        raise InputError(
            "TRL refuses precompute_ref_log_probs with streamed rows.",
            hint="Leave out streaming or precompute_ref_log_probs.",
        )


def _evaluated(source: DatasetSource, split: str | None) -> DatasetSource:
    if split is None:
        # A random part of the rows is kept for it, which may hold the longest.
        return replace(source, name=f"{source.name} (a part of it)")
    found = evaluation_source(source.name, None, split, config=source.config)
    assert found is not None
    return found


def of_entries(items: Sequence[Mapping[str, object]], size: object, *, streams: bool) -> DatasetSource:
    """Return the rows that the entries of ``datasets`` make together.

    Args:
        size: rows kept from training, at random (``test_split_size``); None: none.
        streams: whether TRL streams them.

    Raises:
        InputError: a file is missing, empty or broken, or TRL refuses the entries.
    """
    if streams and size is not None:
        raise InputError(
            "TRL cannot split a streamed dataset: test_split_size ends with an AttributeError.",
            hint="Leave out streaming or test_split_size.",
        )
    shares = [item.get("fraction") is not None for item in items]
    if any(shares) and (streams or not all(shares)):
        reason = "TRL refuses fraction with streaming." if streams else "TRL takes fraction in all datasets or in none."
        raise InputError(reason)
    for item in items:
        _check_shown(item)
        places = DatasetSource("", "", mixture=(item,)).places
        if not places:
            raise InputError(f"data_files of {item.get('path')} is empty.", hint="Name at least one file.")
        for place in places:
            _check_unexpanded("datasets", place)
        _check_files(item)
    plain = _plain(items[0]) if len(items) == 1 else None
    if plain is not None:
        return replace(plain, test_size=size)
    names = [_name(item) for item in items]
    listed = " + ".join(names[:_MOST_NAMED])
    more = f" + {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    entries = tuple({key: value for key, value in item.items() if value is not None} for item in items)
    return DatasetSource(f"{listed}{more}", names[0], mixture=entries, test_size=size)


def _plain(item: Mapping[str, object]) -> DatasetSource | None:
    """Return an entry that is a hub id, a directory, or a single file of a format that is known; None: it is none."""
    path, files = str(item.get("path")), item.get("data_files")
    if isinstance(files, list) and len(files) == 1:
        files = files[0]
    if isinstance(files, str) and not _is_name(files):
        return None
    builder = builder_of(files) if isinstance(files, str) else None
    if any(item.get(name) is not None for name in _FURTHER) or (path if files is not None else None) != builder:
        return None
    config = item.get("name")
    if path in BUILDERS.values() if files is None else config is not None:
        return None
    source = dataset_source(str(files or path), config=None if config is None else str(config))
    return replace(source, split=str(item.get("split") or _TRAIN))


def _check_shown(item: Mapping[str, object]) -> None:
    """Check that an entry can be written into a bundle: the address of its rows must hold no secret."""
    for place in DatasetSource("", "", mixture=(hidden_values(item),)).places:
        if MASK in place:
            raise InputError(
                f"The rows {place} need a secret that is in their address, and would be in every file with it.",
                hint="Download them, or give what is secret by the environment, such as HF_TOKEN, or by ~/.netrc.",
            )


def _check_files(item: Mapping[str, object]) -> None:
    """Check the local files that an entry names one by one, like those of a single dataset."""
    if item.get("path") not in BUILDERS.values():
        return
    for place in DatasetSource("", "", mixture=(item,)).places if item.get("data_files") else ():
        if builder_of(place) is not None and _is_name(place):
            dataset_source(place)


def _is_name(place: str) -> bool:
    """Whether ``datasets`` takes a text for the name of a file, and not for a pattern or an address."""
    return "://" not in place and not glob.has_magic(place)


def _name(item: Mapping[str, object]) -> str:
    places = DatasetSource("", "", mixture=(item,)).places
    config = f" ({item['name']})" if item.get("name") else ""
    return f"{places[0]}{config}" + (f" and {len(places) - 1} more" if len(places) > 1 else "")


@dataclass(frozen=True)
class Rewards:
    """The reward functions of a training.

    Attributes:
        built: names of those that the trainer is built and run with; one of TRL's own in place of each that is left.
        own: the dotted paths of the user's own.
        imported: whether these are imported, by the processes that build and run the trainer.
    """

    built: tuple[str, ...]
    own: tuple[str, ...] = ()
    imported: bool = False

    def sentence(self, *, probed: bool) -> str:
        """Return how a check treats the user's own functions, in a sentence; empty if there are none."""
        named = ", ".join(self.own)
        if not self.own:
            return ""
        if not self.imported:
            return f"Not imported (--import does): {named}. A reward function of TRL's own stands in for each of them."
        if probed:
            return f"Imported and run: {named}."
        return f"Imported and not run: {named}. Their own device memory is not counted."


def named_rewards(read: ReadCommand) -> tuple[str, ...]:
    """Return the reward functions that TRL's script is given; none where it names none.

    Raises:
        UnreadError: it names a reward model.
    """
    if read.script.get(_REWARD_MODEL):
        raise UnreadError(f"A reward model ({_REWARD_MODEL}) is not supported.")
    named = read.script.get(_FUNCTIONS)
    return tuple(map(str, named)) if isinstance(named, list) else ()


def rewards_of(read: ReadCommand, config: Configuration, *, by_command: str = "", imports: bool) -> Rewards:
    """Return the reward functions of a configuration of a trainer that generates completions.

    A name without a dot is one of TRL's (trl/scripts/grpo.py). Where none is named, as with a script of the user's own
    or a configuration object, there are as many as weights.

    Args:
        by_command: TRL's own command that trains by the configuration, such as ``trl grpo``; empty: something else.
        imports: whether modules of the user's own may be imported.

    Raises:
        InputError: TRL's own command gets no reward function.
        UnreadError: it names a reward model.
    """
    names = named_rewards(read)
    if by_command and not names:
        raise InputError(
            f"reward_funcs names no reward function, and `{by_command}` has none of its own to score completions.",
            hint="Name one, such as reward_funcs: [my_rewards.length].",
        )
    weights = config.values.get(_WEIGHTS)
    if not names:
        return Rewards((NO_REWARD,) * (len(weights) if isinstance(weights, list) and weights else 1))
    own = tuple(name for name in names if "." in name)
    return Rewards(tuple(NO_REWARD if name in own and not imports else name for name in names), own, imports)
