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
from autotune.planning.evaluator import Evaluator
from autotune.planning.serving import generating_gpus, held_by_server, server_of
from autotune.techniques.vllm import NAME, SERVER
from autotune.trainers.problem import TrainerProblem

# Trainings that are traced for a split until one fits; each takes as long as one candidate.
_MOST_TRIED = 2


def server_splits(
    evaluator: Evaluator, options: Options, ranked: Sequence[Estimate], server_gpus: int | None = None
) -> tuple[ServerSplit, ...]:
    """Return the splits, those with the fewest GPUs for the server first.

    None unless several GPUs are planned for, the trainer generates, and the user fixes or allows ``vllm=server``. The
    documents of an optimizer step stay what they are: fewer processes make more micro-batches.

    Args:
        ranked: estimates with all GPUs, the best first; the split trains like the first that fits on its GPUs.
        server_gpus: GPUs of the server of the only split that is looked at; None: all.
    """
    problem = evaluator.problem
    if evaluator.target.gpu is None or not _may_serve(problem, options):
        return ()
    numbers = generating_gpus(problem.setting.machine.hardware) if server_gpus is None else (server_gpus,)
    return tuple(_Split(evaluator, options, gpus).found(ranked) for gpus in numbers)


def check_server(problem: TrainerProblem, options: Options, server_gpus: int | None, *, writes: bool) -> None:
    """Check that so many GPUs can be a server's, and that a split can be written.

    Args:
        server_gpus: as the user says, or None.
        writes: whether a bundle is written.

    Raises:
        InputError: there are not so many, vLLM's server is not among the choices, or the GPUs are in several machines.
    """
    hardware = problem.setting.machine.hardware
    if writes and hardware.machines > 1 and (server_gpus is not None or options.wishes.fixed.get(NAME) == SERVER):
        raise InputError(
            f"A bundle with a vLLM server is for one machine, and {hardware.processes} GPUs are in"
            f" {hardware.machines}.",
            hint="Plan for one of them, or leave out --output.",
        )
    if server_gpus is None:
        return
    if hardware.kind == "cpu" or not _may_serve(problem, options):
        raise InputError(
            "--server-gpus says how many GPUs a vLLM server gets, and there is none.",
            hint=f"It is for trainers that generate, with --fix {NAME}={SERVER} or --allow {NAME}.",
        )
    possible = [*generating_gpus(hardware)]
    if server_gpus not in possible:
        few = "" if possible else " Of a single GPU, none can be a server's."
        known = ", ".join(map(str, possible))
        raise InputError(
            f"A server on {server_gpus} of {hardware.processes} GPUs is not possible.{few}",
            hint=f"It takes {known}." if possible else "--num-processes counts the server's GPUs too.",
        )


def split_problem(problem: TrainerProblem, options: Options, server_gpus: int) -> TrainerProblem:
    """Return the problem of a plan without the GPUs of its server; the documents of a step stay what they are.

    Raises:
        InputError: what is left cannot train that.
    """
    setting = problem.setting
    count = setting.machine.hardware.processes - server_gpus
    # Of several machines, the server has a part of one, so that those that train are not alike.
    machine = replace(setting.machine, hardware=replace(setting.machine.hardware, processes=count, machines=1))
    options = replace(options, allowed=options.allowed | {NAME})
    return problem_of(options, setting.workload, machine, setting.global_batch_size)


def _may_serve(problem: TrainerProblem, options: Options) -> bool:
    """Return whether the trainer generates, and the user lets a server do it."""
    fixed = options.wishes.fixed.get(NAME)
    known = {technique.name: technique for technique in problem.trainer.techniques}
    wanted = fixed == SERVER or (fixed is None and NAME in problem.setting.allowed)
    return wanted and NAME in known and not known[NAME].unavailable(SERVER, problem.setting.machine)


class _Split:
    """So many GPUs for the server, and the others for the training."""

    def __init__(self, evaluator: Evaluator, options: Options, gpus: int) -> None:
        target = evaluator.target
        self._whole = evaluator.problem
        self._options = options
        self._target = replace(target, gpu=target.gpu and target.gpu.networked(None))
        self._traces = evaluator.traces
        self._gpus = gpus
        self._processes = self._whole.setting.machine.hardware.processes - gpus

    def found(self, ranked: Sequence[Estimate]) -> ServerSplit:
        """Return what the split comes to."""
        batch, count = self._whole.setting.global_batch_size, self._processes
        if batch % count:
            return self._refused(f"{batch} documents of an optimizer step cannot be shared out among {count} processes")
        try:
            problem = split_problem(self._whole, self._options, self._gpus)
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
        tokens = longest_sequence(candidate, problem)
        held = held_by_server(server_of(plan, model, self._gpus, tokens), model, setting.machine.hardware.memory_bytes)
        if isinstance(held, str):
            return self._refused(held)
        evaluator = Evaluator(problem, self._target, self._traces)
        (estimate,) = evaluator.run([candidate])
        training = evaluator.training(candidate)
        if estimate.memory is None or estimate.spare_bytes is None:
            return self._refused(estimate.reason)
        return ServerSplit(
            self._gpus,
            self._processes,
            candidate=candidate,
            training_bytes=estimate.memory.device_bytes,
            training_spare_bytes=estimate.spare_bytes,
            training_error=estimate.memory.error,
            training_seconds=training.step_seconds if training is not None else None,
            server_bytes=held.requested_bytes,
            cache_bytes=held.cache_bytes,
            sequences=held.sequences,
            serve=serve_command(source.name, self._gpus, tokens, source.revision),
            train=train_command(plan, self._gpus, by_command=trainer.runs_by_command(plan)),
        )

    def _refused(self, reason: str) -> ServerSplit:
        return ServerSplit(self._gpus, self._processes, reason=reason)


def longest_sequence(candidate: Candidate, problem: TrainerProblem) -> int | None:
    """Return the tokens of the longest prompt with its completion; None for a trainer that names no such limit."""
    completion = candidate.get("max_completion_length", candidate.get("max_new_tokens"))
    longest = problem.setting.workload.dataset.documents.longest
    return longest + int(completion) if completion is not None else None
