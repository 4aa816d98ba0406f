"""Which share of the GPU vLLM may take beside the best training that leaves it enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autotune.core.candidate import Candidate
from autotune.core.estimate import Estimate
from autotune.core.vllm import VllmOutlook
from autotune.planning.evaluator import Evaluator
from autotune.planning.sharing import outlook
from autotune.planning.vllm import engine_of
from autotune.techniques.vllm import COLOCATE, COLOCATED, NAME
from autotune.trainers.problem import TrainerProblem

# Trainings that are traced with vLLM until one leaves it enough; each takes as long as one candidate.
_MOST_TRIED = 4


def vllm_outlook(evaluator: Evaluator, ranked: Sequence[Estimate], baseline: Estimate) -> VllmOutlook | None:
    """Return the outlook of the fastest training that leaves vLLM enough with sleep mode.

    If none does, it is the one of the fastest that fits by itself, and if none fits, of the baseline. None if the
    trainer has no vLLM, the device cannot run it, or the training cannot be traced.

    Args:
        ranked: estimates, the best first.
    """
    problem = evaluator.problem
    known = {technique.name: technique for technique in problem.trainer.techniques}
    if evaluator.target.gpu is None or NAME not in known or known[NAME].unavailable(COLOCATE, problem.setting.machine):
        return None
    first: VllmOutlook | None = None
    most_bytes, tried = float("inf"), 0
    for estimate in [estimate for estimate in ranked if estimate.fits] or [baseline]:
        memory = estimate.memory
        if memory is None or memory.device_bytes > most_bytes or tried == _MOST_TRIED:
            continue
        candidate = _with_vllm(problem, estimate.candidate)
        if candidate is None:
            continue
        tried += 1
        found = _traced(evaluator, candidate, fastest=first is None)
        if found is None:
            continue
        first = first or found
        if found.most_sleeping is not None:
            return found
        # Only a training that needs less by what is missing can leave enough.
        missing_bytes = -found.least.sleeping_spare_bytes if found.least is not None else 1
        most_bytes = memory.device_bytes - max(1, missing_bytes)
    return first


def _with_vllm(problem: TrainerProblem, candidate: Candidate) -> Candidate | None:
    """Return a candidate with vLLM on the training's own GPU, or None if that is not legal."""
    chosen = candidate if candidate[NAME] in COLOCATED else candidate.but(**{NAME: COLOCATE})
    normal = problem.normal(chosen)
    setting = replace(problem.setting, allowed=problem.setting.allowed | {NAME})
    return normal if problem.trainer.illegal(normal, setting) is None else None


def _traced(evaluator: Evaluator, candidate: Candidate, *, fastest: bool) -> VllmOutlook | None:
    setting = evaluator.problem.setting
    evaluator.run([candidate])
    training = evaluator.training(candidate)
    engine = engine_of(evaluator.problem.trainer.plan(candidate, setting), setting.workload.model)
    if training is None or engine is None:
        return None
    return outlook(
        candidate,
        training,
        engine,
        setting.workload.model,
        total_bytes=setting.machine.hardware.memory_bytes,
        budget_bytes=evaluator.target.budget_bytes,
        fastest=fastest,
    )
