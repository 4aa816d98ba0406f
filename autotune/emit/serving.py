"""A vLLM server on GPUs of its own and the training that uses it: their commands, and the scripts of a bundle."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import replace

from autotune.core.bundle import ServerSplit
from autotune.core.plan import TrainingPlan
from autotune.emit.comment import one_line

SERVE, TRAIN = "serve.sh", "train.sh"
"""The files of a bundle that start a vLLM server and the training that uses it."""
# The server accepts every client, also at the endpoints that replace its weights.
_HOST, _PORT = "127.0.0.1", 8000
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_MAIN = "main"


def serve_command(model: str, gpus: int | None, max_tokens: int | None, revision: str = _MAIN) -> str:
    """Return the command that starts the server on the first GPUs of a machine, for trainings on it alone.

    The options are those of ``ScriptArguments`` (``trl/scripts/vllm_serve.py``, TRL 1.16). TRL sets the rest as its
    trainers need it, the transfer of weights among it. Dense models take no ``data_parallel_size`` above 1, so all GPUs
    are one tensor-parallel group.

    Args:
        gpus: number of GPUs; None: those of another machine, as vLLM finds them, for trainings on any.
        max_tokens: of the longest prompt with its completion; None: what the model was made for.
    """
    words = ["trl", "vllm-serve", "--model", model]
    words += ["--tensor-parallel-size", str(gpus)] if gpus is not None else []
    words += ["--max-model-len", str(max_tokens)] if max_tokens is not None else []
    words += ["--revision", revision] if revision != _MAIN else []
    if gpus is None:
        return shlex.join(words)
    return f"{visible(range(gpus))} {shlex.join([*words, '--host', _HOST, '--port', str(_PORT)])}"


def with_server_address(plan: TrainingPlan) -> TrainingPlan:
    """Return a training plan that uses the server of :func:`serve_command`."""
    return replace(plan, args={**plan.args, "vllm_server_host": _HOST, "vllm_server_port": _PORT})


def training_gpus(split: ServerSplit) -> range:
    """Return the numbers of the GPUs that train."""
    return range(split.generation, split.generation + split.training)


def visible(gpus: Iterable[int]) -> str:
    """Return the variable that shows a process these GPUs alone."""
    return f"{_VISIBLE}={','.join(map(str, gpus))}"


def shell_script(comment: str, command: str, *before: str) -> str:
    """Return a script whose arguments are further ones of its command.

    Args:
        comment: explanation for the user, one line.
        command: as a shell reads it.
        before: lines that set variables of the command.
    """
    # In the place of the shell, so that what ends the script ends the command.
    lines = ["#!/usr/bin/env bash", f"# {one_line(comment)}", "set -euo pipefail", *before]
    return "\n".join([*lines, f'exec env {command} "$@"']) + "\n"
