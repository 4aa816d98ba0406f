"""Formats candidates, statuses, sizes, rates and paths for reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from math import floor, log10
from pathlib import Path

from autotune.core.candidate import Candidate
from autotune.core.documents.estimate import Estimate
from autotune.core.status import ProbeStatus
from autotune.units import format_bytes, format_duration, format_rate

BASELINE_NAME = "TRL's default"
OWN_NAME = "your configuration"
MISSING = "-"
_ENDED = {
    ProbeStatus.OUT_OF_MEMORY: "ran out of memory",
    ProbeStatus.HOST_OUT_OF_MEMORY: "ran out of host memory",
    ProbeStatus.TIMEOUT: "exceeded its time limit",
    ProbeStatus.UNSUPPORTED: "could not run",
    ProbeStatus.VETOED: "was not probed",
}


def baseline_name(*, is_users: bool, capitalized: bool = False) -> str:
    """Return the name of the baseline: the user's own configuration, or TRL's default.

    Args:
        capitalized: for the start of a sentence.
    """
    name = OWN_NAME if is_users else BASELINE_NAME
    return name[:1].upper() + name[1:] if capitalized else name


def differences(candidate: Candidate, baseline: Candidate, name: str = BASELINE_NAME) -> str:
    """Return a candidate's differences from the baseline, such as ``packing=bfd liger=on``; ``name`` without any."""
    return format_choices(candidate.differences(baseline)) or name


def format_choices(choices: Mapping[str, object]) -> str:
    """Return choices as the command line takes them, such as ``packing=bfd liger=on``."""
    return " ".join(f"{knob}={choice}" for knob, choice in choices.items())


def status_text(status: ProbeStatus) -> str:
    """Return the text of a status, such as ``out of memory``."""
    return status.value.replace("_", " ")


def ended_text(status: ProbeStatus) -> str:
    """Return how a run ended, as a predicate: ``ran out of memory``."""
    return _ENDED.get(status, status.value)


def bytes_or_dash(count: float | None) -> str:
    """Return a byte count, or a dash for None."""
    return MISSING if count is None else format_bytes(count)


def memory_cells(estimate: Estimate | None) -> tuple[str, str, str]:
    """Return device need, spare memory and host need; a dash for each that is not known."""
    memory = estimate.memory if estimate is not None else None
    if estimate is None or memory is None:
        return MISSING, MISSING, MISSING
    return format_bytes(memory.device_bytes), bytes_or_dash(estimate.spare_bytes), format_bytes(memory.machine_bytes)


def printable(text: str) -> str:
    """Return text with control characters, which a terminal would execute, as escape sequences such as ``\\x1b``."""
    return "".join(one if one.isprintable() or one in "\n\t" else repr(one)[1:-1] for one in text)


def rate_or_dash(tokens_per_second: float | None) -> str:
    """Return a token rate, or a dash for None."""
    return MISSING if tokens_per_second is None else format_rate(tokens_per_second)


def predicted_rate(estimate: Estimate | None, text: str) -> str:
    """Return the text of a predicted rate, time or cost, with a mark if it depends on an assumption about the host."""
    return f"~{text}" if estimate is not None and estimate.host_bound and text != MISSING else text


def number_or_dash(value: float | None) -> str:
    """Return a number without decimals, or a dash for None."""
    return MISSING if value is None else f"{value:,.0f}"


def mean_or_dash(value: float | None) -> str:
    """Return a mean of whole numbers, with one decimal if it is not whole; a dash if it is unknown."""
    return number_or_dash(value) if value is None or value == round(value) else f"{value:,.1f}"


def duration_or_dash(seconds: float | None, compared: Iterable[float | None] = ()) -> str:
    """Return a duration in the unit of the shortest of those compared, or a dash for None."""
    shortest = min((each for each in compared if each is not None), default=None)
    return MISSING if seconds is None else format_duration(seconds, shortest)


def cost_text(cost: float | None) -> str:
    """Return a cost in the currency of the user's prices, with two digits at least, or a dash."""
    if cost is None:
        return MISSING
    first_digit = -floor(log10(cost)) if 0 < cost < 1 else 0
    return f"{cost:,.{max(2, first_digit + 1)}f}"


def short_path(path: Path) -> str:
    """Return a path relative to the working directory if it is inside it, else in full; a command can take it."""
    absolute = path.absolute()
    with suppress(ValueError, FileNotFoundError):  # it is outside, or the working directory was removed meanwhile
        short = str(absolute.relative_to(Path.cwd()))
        # A command would read it as an option.
        return f"./{short}" if short.startswith("-") else short
    return str(absolute)
