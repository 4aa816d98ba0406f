"""Splits several GPUs between a vLLM server that generates and the training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autotune.app.options import Options
from autotune.app.problem import problem_of
from autotune.core.candidate import Candidate
from autotune.core.estimate import Estimate
from autotune.core.vllm import ServerSplit
from autotune.emit.serving import serve_command, train_command
from autotune.errors import InputError
from autotune.planning.planner import Accelerator, Planner
from autotune.planning.serving import generating_gpus, held_by_server, server_of
from autotune.planning.tracing.store import Traces
from autotune.techniques.vllm import NAME, SERVER
from autotune.trainers.problem import TrainerProblem

# Trainings that are traced for a split until one fits; each takes as long as one combination of techniques.
_MOST_TRIED = 2


def server_splits(
    problem: TrainerProblem, options: Options, target: Accelerator, traces: Traces, ranked: Sequence[Estimate]
) -> tuple[ServerSplit, ...]:
    """Return the splits, those with the fewest GPUs for the server first.

    None unless several GPUs are planned for, the trainer generates, and the user fixes or allows ``vllm=server``. The
    documents of an optimizer step stay what they are: fewer processes make more micro-batches.

    Args:
        ranked: estimates with all GPUs, the best first; the split trains like the first that fits on its GPUs.
    """
    hardware, fixed = problem.setting.machine.hardware, options.wishes.fixed.get(NAME)
    known = {technique.name: technique for technique in problem.trainer.techniques}
    wanted = fixed == SERVER or (fixed is None and NAME in problem.setting.allowed)
    if (
        target.gpu is None
        or NAME not in known
        or not wanted
        or known[NAME].unavailable(SERVER, problem.setting.machine)
    ):
        return ()
    found = (_Split(problem, options, target, traces, gpus).found(ranked) for gpus in generating_gpus(hardware))
    return tuple(found)


class _Split:
    """So many GPUs for the server, and the others for the training."""

    def __init__(
        self, problem: TrainerProblem, options: Options, target: Accelerator, traces: Traces, gpus: int
    ) -> None:
        self._whole = problem
        self._options = options
        self._target = replace(target, gpu=target.gpu and target.gpu.networked(None))
        self._traces = traces
        self._gpus = gpus
        self._processes = problem.setting.machine.hardware.processes - gpus

    def found(self, ranked: Sequence[Estimate]) -> ServerSplit:
        """Return what the split comes to."""
        setting, count = self._whole.setting, self._processes
        batch = setting.global_batch_size
        if batch % count:
            return self._refused(f"{batch} documents of an optimizer step cannot be shared out among {count} processes")
        # Of several machines, the server has a part of one, so that those that train are not alike.
        machine = replace(setting.machine, hardware=replace(setting.machine.hardware, processes=count, machines=1))
        options = replace(self._options, allowed=self._options.allowed | {NAME})
        try:
            problem = problem_of(options, setting.workload, machine, batch)
        except InputError as error:
            return self._refused(error.message.rstrip("."))
        reason, best = f"no training of the plan is legal on {count} GPUs", None
        for candidate in self._candidates(problem, ranked):
            split = self._trained(problem, candidate)
            reason = split.reason or reason
            if split.fits:
                return split
            best = best or (split if not split.reason else None)
        return best or self._refused(reason)

    def _candidates(self, problem: TrainerProblem, ranked: Sequence[Estimate]) -> Iterator[Candidate]:
        setting = replace(problem.setting, allowed=problem.setting.allowed | {NAME})
        kept = [estimate.candidate for estimate in ranked if estimate.fits] + [problem.baseline]
        normal = dict.fromkeys(problem.normal(candidate.but(**{NAME: SERVER})) for candidate in kept)
        legal = [candidate for candidate in normal if problem.trainer.illegal(candidate, setting) is None]
        yield from legal[:_MOST_TRIED]

    def _trained(self, problem: TrainerProblem, candidate: Candidate) -> ServerSplit:
        setting, trainer = problem.setting, problem.trainer
        model, source = setting.workload.model, setting.workload.model_source
        plan = trainer.plan(candidate, setting)
        tokens = _longest(candidate, problem)
        held = held_by_server(server_of(plan, model, self._gpus, tokens), model, setting.machine.hardware.memory_bytes)
        if isinstance(held, str):
            return self._refused(held)
        planner = Planner(problem, self._target, self._traces, model.layer_kinds, [candidate])
        planner.trace([candidate])
        estimate, training = planner.estimate(candidate), planner.training(candidate)
        if estimate.memory is None or estimate.spare_bytes is None:
            return self._refused(estimate.reason)
        return ServerSplit(
            self._gpus,
            self._processes,
            candidate=candidate,
            training_bytes=estimate.memory.device_bytes,
            training_spare_bytes=estimate.spare_bytes,
            training_seconds=training.step_seconds if training is not None else None,
            server_bytes=held.requested_bytes,
            cache_bytes=held.cache_bytes,
            sequences=held.sequences,
            serve=serve_command(source.name, self._gpus, tokens, source.revision),
            train=train_command(plan, self._gpus, by_command=trainer.runs_by_command(plan)),
        )

    def _refused(self, reason: str) -> ServerSplit:
        return ServerSplit(self._gpus, self._processes, reason=reason)


def _longest(candidate: Candidate, problem: TrainerProblem) -> int | None:
    """Return the tokens of the longest prompt with its completion; None for a trainer that names no such limit."""
    completion = candidate.get("max_completion_length", candidate.get("max_new_tokens"))
    longest = problem.setting.workload.dataset.documents.longest
    return longest + int(completion) if completion is not None else None
