"""Why rows are off by more than the worst that is aimed at: what was found in the sequences of their allocations."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.nullgpu.cases import H100, Case


def _is_ranked(case: Case) -> bool:
    return case.trainer == "reward" and case.gpu == H100


def _has_unequal_shares(case: Case) -> bool:
    return case.choices.get("sharding") == "zero2" and case.processes == 8


_SHARES = (
    "ZeRO-2 holds each tensor whole that a rank's share of the gradients has a part of. The last rank is traced, which "
    "holds its share first; here the tensors of rank 5 are larger, and traced as that rank it is 0.1 % above the run"
)
_CUDNN = (
    "cuDNN's workspace for grouped heads: a trace counts the gradients of keys and values per query head (4 rows of "
    "512 tokens: 8 of 16 MiB, 4 of 4,554: 36 of 72), a null GPU does not; replayed without, it reserves what the run "
    "did, within 0.3 %"
)
_REASONS: tuple[tuple[Callable[[Case], bool], str], ...] = ((_is_ranked, _CUDNN), (_has_unequal_shares, _SHARES))


def reason_of(case: Case) -> str:
    """Return the reason of an exception; of one that nobody has looked into, that."""
    return next((reason for applies, reason in _REASONS if applies(case)), "not explained")
