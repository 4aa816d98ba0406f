"""Why rows are off by more than the worst that is aimed at: what was found in the sequences of their allocations."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.nullgpu.cases import Case

_REASONS: tuple[tuple[Callable[[Case], bool], str], ...] = ()


def reason_of(case: Case) -> str:
    """Return the reason of an exception; of one that nobody has looked into, that."""
    return next((reason for applies, reason in _REASONS if applies(case)), "not explained")
