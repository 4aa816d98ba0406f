"""Divides a machine's GPUs between a vLLM server that generates and the training (``--server-gpus``)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autotune.app.options import Options
from autotune.core.candidate import Candidate
from autotune.core.documents.bundle import ServerSplit
from autotune.core.machine import Machine
from autotune.core.plan import TrainingPlan
from autotune.core.setting import Setting
from autotune.emit.serving import serve_command
from autotune.errors import InputError
from autotune.planning.vllm import Engine, engine_of
from autotune.techniques.vllm import NAME, SERVER, too_long_for_model
from autotune.techniques.vllm_tensor_parallel_size import indivisible_heads
from autotune.trainers.problem import TrainerProblem
from autotune.trainers.prompts import Prompted

UTILIZATION = 0.9
"""The default share of its GPUs that the server takes (``trl/scripts/vllm_serve.py``)."""


def reserve_server_gpus(planned: Machine, options: Options, server_gpus: int | None) -> tuple[Machine, Options]:
    """Return the machine without the GPUs of a server, and the options with ``vllm=server`` fixed.

    Args:
        server_gpus: the user's number of GPUs for the server; None changes nothing.

    Raises:
        InputError: no server can generate for this training, or the server cannot use so many GPUs.
    """
    if server_gpus is None:
        return planned, options
    hardware = planned.hardware
    technique = next((each for each in options.trainer.techniques if each.name == NAME), None)
    fixed = options.fixed.get(NAME, SERVER)
    if technique is None or fixed != SERVER or NAME not in options.allowed - options.excluded:
        raise InputError(
            "--server-gpus is the number of GPUs of a vLLM server, and this plan has no server.",
            hint=f"It is for trainers that generate, with --fix {NAME}={SERVER} or --allow {NAME}.",
        )
    reason = technique.unavailable(SERVER, planned)
    if reason:
        raise InputError(f"No vLLM server can generate here: {reason}.", hint="Leave out --server-gpus.")
    if hardware.machines > 1:
        raise InputError(
            f"A vLLM server needs GPUs of one machine, and {hardware.processes} GPUs are in {hardware.machines}.",
            hint="Plan for one of them, or leave out --server-gpus: the server then has further GPUs.",
        )
    possible = [*generating_gpus(hardware.processes)]
    if server_gpus not in possible:
        few = "" if possible else " Of a single GPU, none can be a server's."
        known = ", ".join(map(str, possible))
        raise InputError(
            f"A server on {server_gpus} of {hardware.processes} GPUs is not possible.{few}",
            hint=f"It takes {known}." if possible else "--num-processes counts the server's GPUs too.",
        )
    hardware = replace(hardware, processes=hardware.processes - server_gpus)
    return replace(planned, hardware=hardware), replace(options, fixed={**options.fixed, NAME: SERVER})


def split_of(problem: TrainerProblem, candidate: Candidate, server_gpus: int) -> ServerSplit | str:
    """Return the vLLM server of a training and its command, or why vLLM does not start, without a full stop.

    Args:
        problem: the training's problem, without the server's GPUs.
    """
    setting = problem.setting
    source, hardware = setting.workload.model_source, setting.machine.hardware
    tokens = longest_sequence(candidate, problem)
    server = server_of(problem.trainer.plan(candidate, setting), setting, server_gpus, tokens)
    if refused := server_error(server):
        return refused
    return ServerSplit(
        generation=server_gpus,
        training=hardware.processes,
        server_bytes=server.requested_bytes,
        cache_bytes=server.cache_bytes,
        sequences=server.sequences,
        serve=serve_command(source.name, server_gpus, tokens, source.revision, hardware.variables),
    )


def check_server(problem: TrainerProblem, server_gpus: int | None) -> None:
    """Check that vLLM starts on the GPUs of a server, if there is one, with the sequences of the baseline.

    Raises:
        InputError: vLLM does not start.
    """
    found = split_of(problem, problem.baseline, server_gpus) if server_gpus is not None else None
    if isinstance(found, str):
        raise InputError(
            f"A server on {server_gpus} of the GPUs is not possible: {found}.", hint="Choose another --server-gpus."
        )


def longest_sequence(candidate: Candidate, problem: TrainerProblem) -> int | None:
    """Return the tokens of the longest prompt of training and evaluation with its completion; None without generation.

    A text prompt counts one more token if the tokenizer prepends one: vLLM adds it (``/v1/completions``).
    """
    trainer = problem.trainer
    if not isinstance(trainer, Prompted):
        return None
    return problem.setting.workload.longest + int(candidate[trainer.max_completion_field]) + trainer.sends_text


def generating_gpus(gpus: int) -> Iterator[int]:
    """Yield the possible numbers of GPUs of a server: powers of two that leave at least one GPU for training."""
    number = 1
    while number < gpus:
        yield number
        number *= 2


def server_of(plan: TrainingPlan, setting: Setting, gpus: int, tokens: int | None) -> Engine:
    """Return the server of a plan, with its weights and cache sharded over the GPUs.

    Args:
        gpus: number of the server's GPUs.
        tokens: tokens of the longest prompt with its completion.
    """
    engine = engine_of(plan, setting)
    assert engine is not None
    return replace(engine, on_server=False, sleeps=False, utilization=UTILIZATION, parallel=gpus, tokens=tokens)


def server_error(server: Engine) -> str:
    """Return the reason that a server does not start on its GPUs; empty if it starts."""
    refused = indivisible_heads(server.model, server.parallel) or too_long_for_model(server.model, server.tokens or 0)
    return refused or server.start_error
