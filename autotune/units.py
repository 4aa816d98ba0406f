"""Parses sizes and durations from a user's text, and formats sizes, counts, durations, rates and shares."""

from __future__ import annotations

import re
from math import inf

from autotune.errors import InputError

KIB = 1024
MIB = KIB**2
GIB = KIB**3

# Binary prefixes are IEC 80000-13, decimal ones SI. Vendors' "80 GB" may mean either, so each is parsed as written;
# autotune shows GiB.
_SIZE_UNITS = {
    "": 1,
    "b": 1,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": 1024 * GIB,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "tb": 1000**4,
}
_DURATION_UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
UNITS = frozenset({*_SIZE_UNITS, *_DURATION_UNITS} - {""})
"""The units of sizes and durations in a user's text, in lower case."""
_NUMBER_AND_UNIT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_MAX_BYTES = 1 << 63
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_SPACE_BY_UNIT = re.compile(r"(?<=\d)\s+(?=[a-z])|(?<=[a-z])\s+(?=\d)")
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(min|[smh])")


def parse_size(text: str | int) -> int:
    """Return the bytes of a size such as ``24GiB`` or ``80 GB``; without a unit, the number is in bytes.

    Raises:
        InputError: the text is not a positive number with or without a unit, or no memory is as large.
    """
    size: float = 0
    if not isinstance(text, str):
        size = text
    elif match := _NUMBER_AND_UNIT.fullmatch(text):
        size = float(match.group(1)) * _SIZE_UNITS.get(match.group(2).lower(), 0)
    if not 0 < size < _MAX_BYTES:
        # Python refuses to write out a number of thousands of digits.
        shown = repr(text) if isinstance(text, str) or abs(text) < _MAX_BYTES else f"{text:#x}"[:20]
        raise InputError(f"{shown} is not a size.", hint="Write a number above 0 and a unit, such as 24GiB.")
    return int(size)


def parse_duration(text: str) -> float:
    """Return the seconds of a duration such as ``10m``, ``90s`` or ``1h30m``; without a unit, the number is in seconds.

    Raises:
        InputError: the text is zero, or neither a number nor a sequence of numbers with the units ``h``, ``m`` or
            ``min``, ``s``.
    """
    # As durations are shown: 1 min 30 s.
    compact = _SPACE_BY_UNIT.sub("", text.strip().lower())
    if _NUMBER.fullmatch(compact):
        compact += "s"
    parts = _DURATION_PART.findall(compact)
    seconds = sum(float(number) * _DURATION_UNITS[unit] for number, unit in parts)
    if "".join(number + unit for number, unit in parts) != compact or not 0 < seconds < inf:
        raise InputError(f"{text!r} is not a duration.", hint="Write a time above 0, such as 90s, 10m or 1h30m.")
    return seconds


def format_bytes(count: float) -> str:
    """Return a byte count in the largest binary unit that keeps it at or above one, such as ``1.25 GiB``."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        # A count that rounds to 1,024 of the next smaller unit is shown as 1 of this.
        if abs(count) >= unit - unit // 2048:
            value = count / unit
            return f"{value:.2f} {name}" if abs(value) < 100 else f"{value:.0f} {name}"
    return f"{count:.0f} B"


def format_count(count: float) -> str:
    """Return a number of things in thousands, millions or billions, such as ``494M`` or ``7.6B``."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= 0.9995 * unit:
            value = count / unit
            return f"{value:.0f}{name}" if value >= 100 else f"{value:.1f}{name}"
    return f"{count:.0f}"


def plural(number: int, noun: str, several: str = "") -> str:
    """Return a number with its noun, such as ``1 probe``, ``1,024 probes`` or ``2 processes``.

    Args:
        several: the plural; empty: the noun with an s.
    """
    return f"{number:,} {noun if number == 1 else several or f'{noun}s'}"


def format_duration(seconds: float, shortest: float | None = None) -> str:
    """Return a duration in two units at the most, such as ``42 s``, ``3 min 05 s`` or ``7 h 12 min``.

    Args:
        shortest: the shortest of the durations that it is compared with, whose larger unit is then the largest, as in
            ``185 s``; None: it stands alone.
    """
    if shortest is not None and round(shortest) < 60 <= round(seconds):
        return f"{seconds:,.0f} s"
    if shortest is not None and round(shortest) < 3600 <= round(seconds):
        return f"{seconds / 60:,.0f} min"
    if seconds < 0.1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def format_seconds(seconds: float) -> str:
    """Return a time of a step in three digits, such as ``1.25 s`` or ``84.3 ms``; from 100 s on as a duration."""
    # Rounded before the unit is chosen: 0.9999 s is 1 s.
    milliseconds = float(f"{1000 * seconds:.3g}")
    if milliseconds >= 100_000:
        return format_duration(seconds)
    return f"{milliseconds / 1000:g} s" if milliseconds >= 1000 else f"{milliseconds:g} ms"


def format_rate(tokens_per_second: float) -> str:
    """Return a token rate with thousands separated, such as ``12,345 tok/s``."""
    return f"{tokens_per_second:,.0f} tok/s"


def format_share(share: float) -> str:
    """Return a share in per cent, such as ``87.0 %``: two decimals above 99 %, and 100 % only for the whole."""
    percent = min(100 * share, 99.99) if share < 1 else 100 * share
    return f"{percent:.2f} %" if 99 < percent < 100 else f"{percent:.1f} %"
