"""Reads the user's prices, per hour of one GPU, from YAML or CSV."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping
from math import isfinite
from pathlib import Path

from autotune.errors import InputError
from autotune.inspection.gpus import gpus, listed_gpu
from autotune.inspection.paths import user_path
from autotune.inspection.yaml_file import check_unique, load_document, read_text

_EXAMPLE = "Write a line such as H100-80GB: 2.99 (YAML) or H100-80GB,2.99 (CSV)."


def read_prices(prices: str | Path | Mapping[str, float]) -> Mapping[str, float]:
    """Return prices by the catalogue's name of the GPU, from a mapping, a ``.csv`` file, or a YAML file.

    Raises:
        InputError: the file cannot be read or has another form, or as in :func:`checked_prices`.
    """
    if isinstance(prices, Mapping):
        return checked_prices(prices.items(), "prices")
    path = user_path(prices)
    text = read_text(path, "file of prices")
    return checked_prices(_read_csv(path, text) if path.suffix.lower() == ".csv" else _read_yaml(path, text), str(path))


def checked_prices(prices: Iterable[tuple[object, object]], where: str) -> Mapping[str, float]:
    """Return prices by the catalogue's name of the GPU.

    Args:
        prices: name and price of each.
        where: name of the source, for messages.

    Raises:
        InputError: a GPU is not in the catalogue or is named twice, or a price is not a number above zero.
    """
    checked: dict[str, float] = {}
    for name, price in prices:
        gpu = listed_gpu(str(name))
        if gpu is None:
            known = ", ".join(each.name for each in gpus())
            raise InputError(f"{where}: {str(name)!r} is not a known GPU.", hint=f"There are {known}.")
        if gpu.name in checked:
            raise InputError(f"{where} has two prices of {gpu.name}.", hint="Give one.")
        checked[gpu.name] = _checked_price(price, f"{where}: the price of {name}")
    if not checked:
        raise InputError(f"{where} has no prices.", hint=_EXAMPLE)
    return checked


def _checked_price(price: object, what: str) -> float:
    try:
        number = float(price) if isinstance(price, int | float | str) and not isinstance(price, bool) else None
    except (ValueError, OverflowError):
        number = None
    if number is None or not isfinite(number) or number <= 0:
        raise InputError(f"{what} is {price!r}, which is not a number above zero.", hint="Write for instance 2.99.")
    return number


def _read_yaml(path: Path, text: str) -> Iterator[tuple[object, object]]:
    root, document = load_document(text, path)
    check_unique(root, path)
    if document is not None and not isinstance(document, Mapping):
        raise InputError(f"{path} does not map names of GPUs to prices.", hint=_EXAMPLE)
    yield from (document or {}).items()


def _read_csv(path: Path, text: str) -> Iterator[tuple[object, object]]:
    stripped = ([cell.strip() for cell in row] for row in csv.reader(text.splitlines()))
    rows = [(number, cells) for number, cells in enumerate(stripped, 1) if any(cells)]
    for number, cells in rows:
        if len(cells) != 2:
            raise InputError(f"{path}, line {number}: {len(cells)} columns instead of two.", hint=_EXAMPLE)
        is_heading = number == rows[0][0] and listed_gpu(cells[0]) is None and not cells[1][:1].isdigit()
        if not is_heading:
            yield cells[0], cells[1]
