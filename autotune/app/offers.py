"""Suggests to the user, in a sentence, packing at another global batch if that is predicted to be faster."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from autotune.core.candidate import Candidate
from autotune.core.estimate import Estimate
from autotune.core.setting import GLOBAL_BATCH
from autotune.techniques.packing import CUTTING, documents_per_row
from autotune.trainers.problem import TrainerProblem

_WORTH_SAYING = 1.1
"""Smallest predicted speed-up that is offered: predictions of time are off by as much."""


def packing_offer(
    problem: TrainerProblem, estimate: Callable[[Candidate], Estimate], best: Candidate
) -> tuple[str, ...]:
    """Return what packed rows would bring that hold more documents than an optimizer step was asked to have.

    Example: "Packed rows of 2,048 tokens hold 15 documents: from --global-batch-size 15 on they are predicted to be 1.3
    times as fast."

    Args:
        estimate: of any candidate.
        best: the candidate that is recommended.
    """
    rate = estimate(best).tokens_per_second
    if "packing" not in problem.choices or not rate:
        return ()
    setting = problem.setting
    unbound = replace(setting, allowed=setting.allowed | {GLOBAL_BATCH})
    found: list[tuple[float, int]] = []
    for length in problem.choices["max_length"]:
        packed = best.but(packing=CUTTING, padding_free="off", max_length=length, per_device_train_batch_size=1)
        held_back = problem.illegal(packed) is not None and problem.trainer.illegal(packed, unbound) is None
        predicted = estimate(packed) if held_back else None
        if predicted is not None and predicted.fits and predicted.tokens_per_second:
            found.append((predicted.tokens_per_second / rate, int(length)))
    speedup, length = max(found, default=(0.0, 0))
    if speedup < _WORTH_SAYING:
        return ()
    held = math.ceil(documents_per_row(setting.workload.dataset.documents, CUTTING, length))
    if held <= setting.documents_per_process:
        return ()
    asked = held * setting.machine.hardware.processes
    what = f"Packed rows of {length:,} tokens hold {held:,} documents"
    return (f"{what}: from --global-batch-size {asked:,} on they are predicted to be {speedup:.1f} times as fast.",)
