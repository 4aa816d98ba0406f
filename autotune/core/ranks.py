"""Combines the measurements of all ranks: memory of the worst rank, time of the slowest one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from autotune.core.measurement import Measurement

_MOST = ("peak_bytes", "reserved_bytes", "device_bytes", "allocation_retries", "worst_tokens",
         "step_seconds", "micro_batch_seconds", "update_seconds", "start_seconds", "training_seconds",
         "tokens_per_second_error", "evaluation_seconds")  # fmt: skip
_SUM = ("tokens_per_step", "documents_per_step", "host_peak_bytes")


def of_ranks(ranks: Sequence[Measurement]) -> Measurement:
    """Return the measurement of a training from those of its processes, in the order of their ranks.

    The status is that of the first rank that did not end ``ok``. Memory is that of the rank that needs the most, since
    each rank has its own device; that of the host is what all need together, at most, since they share it. A step takes
    as long as on the slowest rank, and trains on the tokens of all ranks.

    Args:
        ranks: measurements by rank; not empty.
    """
    failed = next((shown for shown in ranks if not shown.ok), None)
    if failed is not None or len(ranks) == 1:
        return failed or ranks[0]
    found = replace(
        ranks[0],
        **{name: _joined(max, ranks, name) for name in _MOST},
        **{name: _joined(sum, ranks, name) for name in _SUM},
        peaks={phase: max(shown.peaks.get(phase, 0) for shown in ranks) for phase in ranks[0].peaks},
        pass_seconds=max(shown.pass_seconds for shown in ranks),
    )
    if found.tokens_per_step is None or not found.step_seconds:
        return found
    # The time of phases that run once is spread over the steps of an epoch, as each rank did for itself.
    spread = max(_spread_seconds(shown) for shown in ranks)
    return replace(found, tokens_per_second=found.tokens_per_step / (found.step_seconds + spread))


def _spread_seconds(shown: Measurement) -> float:
    if not shown.tokens_per_second or shown.tokens_per_step is None or shown.step_seconds is None:
        return 0.0
    return max(0.0, shown.tokens_per_step / shown.tokens_per_second - shown.step_seconds)


def _joined(join: Callable[[list[Any]], Any], ranks: Sequence[Measurement], name: str) -> Any:
    known = [figure for shown in ranks if (figure := getattr(shown, name)) is not None]
    return join(known) if known else None
