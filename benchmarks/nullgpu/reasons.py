"""Why rows are off by more than the worst that is aimed at: what was found in the sequences of their allocations."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.nullgpu.cases import Case


def _is_ranked_short(case: Case) -> bool:
    return case.trainer == "reward" and max(case.lengths) == 512 and not case.choices


def _is_mixed(case: Case) -> bool:
    return case.trainer == "sft" and set(case.lengths) == {500, 1000}


_PADDED = (
    "a trace takes every row of a padded micro-batch to be nearly as long as the longest, so that the loss has as many "
    "tokens as it may; here the others are half as long"
)
_CUDNN = (
    "cuDNN's workspace for grouped heads: a trace counts 16.1 MiB, a null GPU 8.1; replayed with those, the trace "
    "reserves exactly what the run did"
)
_REASONS: tuple[tuple[Callable[[Case], bool], str], ...] = ((_is_mixed, _PADDED), (_is_ranked_short, _CUDNN))


def reason_of(case: Case) -> str:
    """Return the reason of an exception; of one that nobody has looked into, that."""
    return next((reason for applies, reason in _REASONS if applies(case)), "not explained")
