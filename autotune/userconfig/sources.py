"""Resolves the model, rows and reward functions that a configuration names, as TRL's scripts do."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autotune.confidential import MASK, hidden_values
from autotune.core.configuration import MIXTURE, MODEL_CONFIG, Configuration, ReadCommand
from autotune.core.files.nested import mapping
from autotune.core.workload import DatasetSource, Init, ModelSource
from autotune.errors import InputError, UnreadError
from autotune.inspection.dataset import BUILDERS, builder_of, check_split, dataset_source
from autotune.inspection.model import model_source
from autotune.inspection.paths import exists, is_file
from autotune.trainers.declared import LOADING
from autotune.trainers.distillation import TEACHER, TEACHER_REVISION
from autotune.trainers.prompts import NO_REWARD
from autotune.userconfig.fields import reading_of, trainer_of

_HINT = "Name a dataset with --dataset."
_TRAIN, _TEST = "train", "test"
# Fields of trl.scripts.utils.DatasetConfig that a plain dataset does not have.
_MIXTURE_ONLY = ("data_dir", "columns", "fraction")
_MAX_NAMED = 3
_STREAMS = "dataset_streaming"
_FUNCTIONS, _REWARD_MODEL, _WEIGHTS = "reward_funcs", "reward_model_name_or_path", "reward_weights"


@dataclass(frozen=True)
class Sources:
    """The model and the rows of a training.

    Attributes:
        evaluation: the rows to evaluate on, or None.
        streams: whether TRL streams the rows; autotune reads them whole.
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
        name, dataset: replacements of the model and the rows, or None.

    Raises:
        UnreadError: a setting of the rows is not supported.
        InputError: the model or the rows are missing or cannot be used.
    """
    model = read.configurations[MODEL_CONFIG].values
    own = model.get("model_name_or_path")
    named = str(name) if name else own
    if not isinstance(named, str):
        raise InputError(
            "The configuration names no model.", hint="Write model_name_or_path, or give `model` (`--model`)."
        )
    # The revision only applies to the configuration's own model; model_init_kwargs has precedence (trl/scripts).
    loading = mapping(config.values.get(LOADING))
    revision = loading.get("revision") or model.get("model_revision") if named == own else None
    if name is None:
        _check_unexpanded("model_name_or_path", named)
    source = model_source(named, "random", loads_adapters=trainer_of(config).loads_adapters)
    source = replace(source, revision=str(revision or "main"))
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
        InputError: it names none, without which TRL fails; or the teacher cannot be used.
    """
    named = config.values.get(TEACHER)
    if not isinstance(named, str):
        raise InputError("The configuration names no teacher.", hint=f"Write {TEACHER}.")
    _check_unexpanded(TEACHER, named)
    revision = str(config.values.get(TEACHER_REVISION) or "main")
    return replace(model_source(named, init, tokenizes=False), revision=revision)


def _check_unexpanded(key: str, place: str) -> None:
    """Check that a path of the configuration has no ``~``, which transformers and datasets do not expand."""
    if place.startswith("~"):
        raise InputError(f"{key}: {place} is not found: TRL does not expand ~.", hint="Write the whole path.")


def _check_not_file(key: str, name: str) -> None:
    """Check that the name of a dataset is no file, which ``load_dataset`` takes for a hub id.

    Raises:
        InputError: it is.
    """
    if is_file(name):
        builder = builder_of(name) or "json, csv or parquet"
        raise InputError(
            f"{key} is the file {name}, which TRL cannot load: it accepts hub ids and directories there.",
            hint=f"Write datasets, with path: {builder} and data_files: {name}.",
        )


def _rows(read: ReadCommand, dataset: str | Path | None, *, evaluates: bool) -> tuple[DatasetSource, str | None, bool]:
    """Return the rows to train on, the split to evaluate on, and whether TRL streams them.

    The split is None if evaluation uses a part of the same rows.
    """
    script = read.script
    train, test = (str(script.get(f"dataset_{name}_split") or name) for name in (_TRAIN, _TEST))
    mixture = mapping(read.configurations[MIXTURE].values if MIXTURE in read.configurations else None)
    items = mixture.get("datasets") or []
    size = mixture.get("test_split_size") if items else None
    if dataset is not None:
        source = replace(dataset_source(dataset), test_size=size)
        # A file has one split; evaluation rows are assumed to be like the training rows.
        return source, None if source.data_files is not None or size is not None else test, False
    if isinstance(items, list) and items:
        streams = bool(mixture.get("streaming"))
        _check_splits(train, test, evaluates=evaluates, parted=size is not None)
        return mixture_source(items, size, streams=streams), None, streams
    name = script.get("dataset_name")
    if not isinstance(name, str):
        raise InputError(
            "The configuration names no dataset.", hint="Write datasets or dataset_name, or give --dataset."
        )
    _check_not_file("dataset_name", name)
    _check_unexpanded("dataset_name", name)
    check_split(train)
    config = script.get("dataset_config")
    source, streams = dataset_source(name, train, None if config is None else str(config)), bool(script.get(_STREAMS))
    return replace(source, all_splits=not streams), test, streams


def _check_splits(train: str, test: str, *, evaluates: bool, parted: bool) -> None:
    """Check that the splits are those of a mixture: ``train``, and ``test`` with ``test_split_size``."""
    known = (_TRAIN, _TEST) if parted else (_TRAIN,)
    if train not in known:
        raise InputError(
            f"dataset_train_split is {train}, and datasets only has the split {' and '.join(known)}: TRL fails with a "
            "KeyError.",
            hint="Write split in each entry of datasets.",
        )
    if evaluates and not parted:
        raise InputError(
            f"Evaluation needs the split {test}, which datasets does not have: TRL fails with a KeyError.",
            hint="Write test_split_size, or dataset_name with a directory that has both; or leave out eval_strategy.",
        )
    if evaluates and test != _TEST:
        raise InputError(
            f"dataset_test_split is {test}, and test_split_size creates the split {_TEST}.",
            hint=f"Write dataset_test_split: {_TEST}, or leave it out.",
        )


def _check_streamed(rows: DatasetSource, config: Configuration) -> None:
    """Check for settings that transformers and TRL refuse with streamed rows.

    Raises:
        UnreadError: the rows are not on this machine.
        InputError: there is such a setting.
    """
    if not all(exists(place) or glob.glob(place) for place in rows.places):  # noqa: PTH207 (patterns may be absolute)
        raise UnreadError("The lengths of rows streamed from another machine are not known.", hint=_HINT)
    steps = config.values.get("max_steps")
    if not isinstance(steps, int) or steps <= 0:
        raise InputError(
            "With streaming, transformers cannot count the rows of an epoch, and needs max_steps.",
            hint="Write max_steps.",
        )
    if config.values.get("precompute_ref_log_probs"):
        raise InputError(
            "TRL refuses precompute_ref_log_probs with streamed rows.",
            hint="Leave out streaming or precompute_ref_log_probs.",
        )


def _evaluated(source: DatasetSource, split: str | None) -> DatasetSource:
    """Return the rows to evaluate on: a whole split, which may also be the one to train on, or random rows."""
    if split is None:
        # TRL splits off random rows for it, which may include the longest.
        return replace(source, name=f"{source.name} (a part of it)")
    check_split(split)
    rows = dataset_source(source.name, split, source.config)
    return replace(rows, name=f"{rows.name} ({split})")


def mixture_source(items: Sequence[Mapping[str, object]], size: object, *, streams: bool) -> DatasetSource:
    """Return the source of TRL's mixture, the entries of ``datasets``.

    Args:
        size: ``test_split_size``, by which random rows are split off the training rows; None: no split.
        streams: whether TRL streams them.

    Raises:
        InputError: a file is missing, empty or broken, or TRL refuses the entries.
    """
    if streams and size is not None:
        raise InputError(
            "TRL cannot split a streamed dataset: test_split_size fails with an AttributeError.",
            hint="Leave out streaming or test_split_size.",
        )
    shares = [item.get("fraction") is not None for item in items]
    if any(shares) and (streams or not all(shares)):
        if streams:
            raise InputError("TRL refuses fraction with streaming.", hint="Leave out one of them.")
        raise InputError("TRL needs fraction in all datasets or in none.", hint="Write fraction: 1.0 for the others.")
    if any(shares) and not any(item["fraction"] for item in items):
        raise InputError(
            "fraction is 0 for all datasets, and TRL divides by the sum of their fractions.",
            hint="Write a fraction above 0 for one of them.",
        )
    for item in items:
        _check_entry(item)
    plain = _plain(items[0]) if len(items) == 1 else None
    if plain is not None:
        return replace(plain, test_size=size)
    names = [_name(item) for item in items]
    listed = " + ".join(names[:_MAX_NAMED])
    more = f" + {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    entries = tuple({key: value for key, value in item.items() if value is not None} for item in items)
    return DatasetSource(f"{listed}{more}", names[0], mixture=entries, test_size=size)


def _plain(item: Mapping[str, object]) -> DatasetSource | None:
    """Return the source of an entry that is a hub id, a directory, or a single supported file; else None."""
    path, files = str(item.get("path")), item.get("data_files")
    if isinstance(files, list) and len(files) == 1:
        files = files[0]
    if isinstance(files, str) and not _is_name(files):
        return None
    builder = builder_of(files) if isinstance(files, str) else None
    if any(item.get(name) is not None for name in _MIXTURE_ONLY) or (path if files is not None else None) != builder:
        return None
    config = item.get("name")
    if path in BUILDERS.values() if files is None else config is not None:
        return None
    source = dataset_source(str(files or path), config=None if config is None else str(config))
    return replace(source, split=str(item.get("split") or _TRAIN))


def _check_entry(item: Mapping[str, object]) -> None:
    """Check an entry of ``datasets``: the names of its rows, and its local files like a single dataset's file.

    Raises:
        InputError: TRL cannot load it, a file is missing, empty or broken, or an address has a secret.
    """
    if item.get("path") not in BUILDERS.values():
        _check_not_file("path in datasets", str(item.get("path")))
    if item.get("split", _TRAIN) is None:
        raise InputError(
            "split in datasets is null: TRL then loads each split separately, and cannot join them.",
            hint="Leave it out for train, or write a split, such as train+test.",
        )
    _check_without_secrets(item)
    places = DatasetSource("", "", mixture=(item,)).places
    if not places:
        raise InputError(f"data_files of {item.get('path')} is empty.", hint="Name at least one file.")
    reads_files = item.get("path") in BUILDERS.values() and item.get("data_files")
    for place in places:
        _check_unexpanded("datasets", place)
        if reads_files and builder_of(place) is not None and _is_name(place):
            dataset_source(place)


def _check_without_secrets(item: Mapping[str, object]) -> None:
    """Check that the address of an entry's rows has no secret, since bundles contain it."""
    for place in DatasetSource("", "", mixture=(hidden_values(item),)).places:
        if MASK in place:
            raise InputError(
                f"The address of the rows {place} has a secret, which would be written to files.",
                hint="Download them, or pass the secret by the environment, such as HF_TOKEN, or by ~/.netrc.",
            )


def _is_name(place: str) -> bool:
    """Whether a text is the name of a file for ``datasets``, neither a pattern nor an address."""
    return "://" not in place and not glob.has_magic(place)


def _name(item: Mapping[str, object]) -> str:
    places = DatasetSource("", "", mixture=(item,)).places
    config = f" ({item['name']})" if item.get("name") else ""
    return f"{places[0]}{config}" + (f" and {len(places) - 1} more" if len(places) > 1 else "")


@dataclass(frozen=True)
class Rewards:
    """The reward functions of a training.

    Attributes:
        built: names of the functions with which the trainer is built and run; one of TRL's own replaces each that is
            not imported.
        own: the dotted paths of the user's own functions.
        imported: whether the processes that build and run the trainer import these.
    """

    built: tuple[str, ...]
    own: tuple[str, ...] = ()
    imported: bool = False

    def sentence(self, *, probed: bool) -> str:
        """Return how a check treats the user's own functions, in a sentence; empty without any."""
        named = ", ".join(self.own)
        if not self.own:
            return ""
        if not self.imported:
            return f"Not imported (--import does): {named}. A reward function of TRL's own replaces each of them."
        if probed:
            return f"Imported and run: {named}."
        return f"Imported and not run: {named}. Their own device memory is not counted."


def named_rewards(read: ReadCommand) -> tuple[str, ...]:
    """Return the ``reward_funcs`` of TRL's script; empty without any.

    Raises:
        UnreadError: it names a reward model.
    """
    if read.script.get(_REWARD_MODEL):
        raise UnreadError(f"A reward model ({_REWARD_MODEL}) is not supported.")
    named = read.script.get(_FUNCTIONS)
    return tuple(map(str, named)) if isinstance(named, list) else ()


def rewards_of(read: ReadCommand, config: Configuration, *, by_command: str = "", imports: bool) -> Rewards:
    """Return the reward functions of a configuration for a trainer that generates completions.

    A name without a dot is one of TRL's (trl/scripts/grpo.py). Without names, as for the user's own script or a
    configuration object, as many functions as weights are assumed.

    Args:
        by_command: TRL's own command that trains by the configuration, such as ``trl grpo``; else empty.
        imports: whether the user's own modules may be imported.

    Raises:
        InputError: the configuration is for TRL's own command and names no reward function.
        UnreadError: it names a reward model.
    """
    names = named_rewards(read)
    if by_command and not names:
        raise InputError(
            f"reward_funcs names no reward function, and `{by_command}` needs one to score completions.",
            hint="Name one, such as reward_funcs: [my_rewards.length].",
        )
    weights = config.values.get(_WEIGHTS)
    if not names:
        return Rewards((NO_REWARD,) * (len(weights) if isinstance(weights, list) and weights else 1))
    own = tuple(name for name in names if "." in name)
    return Rewards(tuple(NO_REWARD if name in own and not imports else name for name in names), own, imports)
