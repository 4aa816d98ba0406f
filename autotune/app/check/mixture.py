"""Reads the entries of TRL's ``datasets``: one dataset, or a mixture of which TRL makes one (``trl.get_dataset``)."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autotune.confidential import MASK, hidden_values
from autotune.core.workload import DatasetSource
from autotune.errors import InputError
from autotune.inspection.dataset import BUILDERS, dataset_source

# Fields of trl.scripts.utils.DatasetConfig beside those of a plain dataset.
_FURTHER = ("name", "data_dir", "columns", "fraction")
_MOST_NAMED = 3


@dataclass(frozen=True)
class Loaded:
    """The rows to train on, as TRL loads them.

    Attributes:
        test: the split to evaluate on; None where it is a part of the same rows.
        streams: whether TRL streams them.
        mixed: whether they are entries of ``datasets``, which TRL makes one dataset of, without splits of its own.
    """

    source: DatasetSource
    test: str | None
    streams: bool = False
    mixed: bool = False


def of_entries(items: Sequence[Mapping[str, object]], size: object, *, streams: bool) -> DatasetSource:
    """Return the rows that the entries of ``datasets`` make together.

    Args:
        size: what is kept from training, at random (``test_split_size``); None: nothing.
        streams: whether TRL streams them.

    Raises:
        InputError: a file is missing, empty or broken, or TRL refuses the entries.
    """
    if streams and size is not None:
        raise InputError("TRL cannot part rows that are streamed: test_split_size ends with an AttributeError.")
    shares = [item.get("fraction") is not None for item in items]
    if any(shares) and (streams or not all(shares)):
        said = "TRL refuses fraction with streaming." if streams else "TRL wants fraction in all datasets or in none."
        raise InputError(said)
    for item in items:
        _check_shown(item)
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
    builder = BUILDERS.get(Path(files).suffix.lower()) if isinstance(files, str) else None
    if any(item.get(name) is not None for name in _FURTHER) or (path if files is not None else None) != builder:
        return None
    if files is None and path in BUILDERS.values():
        return None
    return replace(dataset_source(str(files or path)), split=str(item.get("split") or "train"))


def _check_shown(item: Mapping[str, object]) -> None:
    """Check that an entry can be handed over: what names the rows cannot be without what is secret in it."""
    for place in DatasetSource("", "", mixture=(hidden_values(item),)).places:
        if MASK in place:
            raise InputError(
                f"The rows {place} need a secret that is in their address, and would be in every file with it.",
                hint="Download them, or give what is secret by the environment, such as HF_TOKEN, or by ~/.netrc.",
            )


def _check_files(item: Mapping[str, object]) -> None:
    """Check the files of an entry that are named one by one and are here, as those of a single dataset are."""
    if item.get("path") not in BUILDERS.values():
        return
    for place in DatasetSource("", "", mixture=(item,)).places if item.get("data_files") else ():
        if Path(place).suffix.lower() in BUILDERS and "://" not in place and not glob.has_magic(place):
            dataset_source(place)


def _name(item: Mapping[str, object]) -> str:
    places = DatasetSource("", "", mixture=(item,)).places
    config = f" ({item['name']})" if item.get("name") else ""
    return f"{places[0]}{config}" + (f" and {len(places) - 1} more" if len(places) > 1 else "")
