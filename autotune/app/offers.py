"""Predicts two changes that a search does not make: a larger batch of packed rows, and without the longest prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from autotune.core.candidate import Candidate, Choice
from autotune.core.documents.estimate import Estimate
from autotune.core.setting import Setting
from autotune.core.step_time import TIME_ERROR
from autotune.planning.evaluator import Evaluator
from autotune.techniques.packing import CUTTING, documents_per_row
from autotune.trainers.problem import TrainerProblem
from autotune.units import format_bytes, plural

_MIN_SPEEDUP = 1 + TIME_ERROR
"""Smallest predicted speed-up that is offered. Of 15 that were predicted between 1.1 and 1.25, of two configurations of
one workload on one GPU, 9 were measured above 1; of 143 larger ones, 142 were (`benchmarks/gpu/results`)."""
_PROMPT_COVERAGE = 0.99
"""The ``--prompt-coverage`` of an offer."""
_MIN_SAVED_SHARE = 0.05
"""Smallest share of the memory that an offer to drop prompts saves: half of the predictions have far smaller errors
(docs/accuracy.md), and errors common to both predictions cancel in the difference."""


def offers(evaluator: Evaluator, best: Estimate, *, fits: bool) -> tuple[str, ...]:
    """Return all offers in addition to the recommended candidate.

    Args:
        fits: whether the recommended candidate fits, as measured or else as predicted; only then is speed offered.
    """
    problem = evaluator.problem
    packing = packing_offer(problem, evaluator.run, best) if fits else ()

    def traced(candidate: Candidate, setting: Setting) -> Estimate:
        return evaluator.for_problem(replace(problem, setting=setting), [candidate]).estimate(candidate)

    return (*packing, *dropping_offer(problem, traced, best.candidate))


def packing_offer(
    problem: TrainerProblem, run: Callable[[Sequence[Candidate]], Sequence[Estimate]], best: Estimate
) -> tuple[str, ...]:
    """Return the speed-up of packed rows that hold more documents than the global batch allows.

    Example: "Packed rows of 2,048 tokens hold 15 documents: with --global-batch-size 15 they are predicted to be 1.3
    times as fast."

    Args:
        run: traces candidates, legal or not.
        best: the candidate that is recommended.
    """
    rate = best.tokens_per_second
    fixed: dict[str, Choice] = {"packing": CUTTING, "padding_free": "off", "per_device_train_batch_size": 1}
    if not rate or any(choice not in problem.choices.get(knob, ()) for knob, choice in fixed.items()):
        return ()
    setting, processes = problem.setting, problem.setting.machine.hardware.processes
    held_back: dict[Candidate, int] = {}
    for length in problem.choices["max_length"]:
        packed = best.candidate.but(**fixed, max_length=length)
        held = round(documents_per_row(setting.workload.dataset.documents, CUTTING, int(length)))
        larger = held > setting.documents_per_process and problem.illegal(packed) is not None
        if larger and problem.trainer.illegal(packed, replace(setting, global_batch_size=held * processes)) is None:
            held_back[packed] = held
    rates = {each.candidate: (each.tokens_per_second or 0.0) if each.fits else 0.0 for each in run([*held_back])}
    fastest = max(rates, key=rates.__getitem__, default=None)
    if fastest is None or rates[fastest] / rate < _MIN_SPEEDUP:
        return ()
    held, length, times = held_back[fastest], int(fastest["max_length"]), f"{rates[fastest] / rate:.1f} times as fast"
    what, batch = f"Packed rows of {length:,} tokens hold {held:,} documents", held * processes
    return (f"{what}: with --global-batch-size {batch} they are predicted to be {times}.",)


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
    if memory is None or saved_bytes < _MIN_SAVED_SHARE * memory.device_bytes:
        return ()
    what = f"Dropping {plural(dropped, 'prompt')} over {cut:,} tokens (--prompt-coverage {_PROMPT_COVERAGE:g})"
    return (f"{what} is predicted to save {format_bytes(saved_bytes)}.",)
