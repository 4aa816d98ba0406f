"""Predicts a change that a search does not make: a training without the longest prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autotune.core.candidate import Candidate
from autotune.core.estimate import Estimate
from autotune.core.setting import Setting
from autotune.trainers.problem import TrainerProblem
from autotune.units import counted, format_bytes

_PROMPT_COVERAGE = 0.99
"""The ``--prompt-coverage`` of an offer."""
_LEAST_SAVED_SHARE = 0.05
"""Smallest share of the memory that an offer to drop prompts saves: half of the predictions have far smaller errors
(docs/accuracy.md), and errors common to both predictions cancel in the difference."""


def dropping_offer(
    problem: TrainerProblem, traced: Callable[[Candidate, Setting], Estimate], best: Candidate
) -> tuple[str, ...]:
    """Return the memory saved by dropping the few longest prompts, for a trainer that cuts none.

    Example: "Dropping 3 prompts over 2,048 tokens (--prompt-coverage 0.99) is predicted to save 9.00 GiB."

    Args:
        traced: the estimate of any candidate with the rows of a setting, from traces of its own.
        best: the candidate that is recommended.
    """
    setting = problem.setting
    workload, dataset = setting.workload, setting.workload.dataset
    cut = dataset.lengths.quantile(_PROMPT_COVERAGE)
    dropped = dataset.lengths.rows - dataset.lengths.up_to(cut).rows
    if not problem.trainer.generates or workload.rollouts.prompt_coverage < 1 or not dropped:
        return ()
    evaluation = workload.evaluation
    fewer = replace(
        workload,
        dataset=dataset.up_to(cut),
        evaluation=evaluation and evaluation.up_to(evaluation.lengths.quantile(_PROMPT_COVERAGE)),
    )
    without = replace(setting, workload=fewer)
    memory = traced(best, setting).memory
    less = traced(best, without).memory if problem.trainer.illegal(best, without) is None else None
    saved_bytes = memory.device_bytes - less.device_bytes if memory is not None and less is not None else 0
    if memory is None or saved_bytes < _LEAST_SAVED_SHARE * memory.device_bytes:
        return ()
    what = f"Dropping {counted(dropped, 'prompt')} over {cut:,} tokens (--prompt-coverage {_PROMPT_COVERAGE:g})"
    return (f"{what} is predicted to save {format_bytes(saved_bytes)}.",)
