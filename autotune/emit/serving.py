"""Commands and bundle scripts of a vLLM server on separate GPUs and of the training that uses it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import replace

from autotune.core.documents.bundle import ServerSplit
from autotune.core.plan import TrainingPlan
from autotune.emit.comment import one_line

SERVE, TRAIN = "serve.sh", "train.sh"
"""The files of a bundle that start a vLLM server and the training that uses it."""
# Bound to this machine: the server has no authentication, even for the endpoints that replace its weights.
_HOST, _PORT = "127.0.0.1", 8000
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_MAIN = "main"


def serve_command(
    model: str, gpus: int | None, max_tokens: int | None, revision: str = _MAIN, variables: str = ""
) -> str:
    """Return the command that starts the server on the first GPUs of a machine, reachable from that machine only.

    The options are those of ``ScriptArguments`` (``trl/scripts/vllm_serve.py``, TRL 1.16). TRL sets all others for its
    trainers, including the weight transfer. Dense models take no ``data_parallel_size`` above 1, so all GPUs are one
    tensor-parallel group.

    Args:
        gpus: number of GPUs; None: the server runs elsewhere, on any GPUs and reachable from any machine.
        max_tokens: tokens of the longest prompt with its completion; None: the model's maximum.
        variables: see :func:`visible`.
    """
    words = ["trl", "vllm-serve", "--model", model]
    words += ["--tensor-parallel-size", str(gpus)] if gpus is not None else []
    words += ["--max-model-len", str(max_tokens)] if max_tokens is not None else []
    words += ["--revision", revision] if revision != _MAIN else []
    if gpus is None:
        return shlex.join(words)
    return f"{visible(range(gpus), variables)} {shlex.join([*words, '--host', _HOST, '--port', str(_PORT)])}"


def with_server_address(plan: TrainingPlan) -> TrainingPlan:
    """Return a training plan that uses the server of :func:`serve_command`."""
    return replace(plan, args={**plan.args, "vllm_server_host": _HOST, "vllm_server_port": _PORT})


def training_gpus(split: ServerSplit) -> range:
    """Return the numbers of the GPUs that train."""
    return range(split.generation, split.generation + split.training)


def visible(gpus: Iterable[int], variables: str = "") -> str:
    """Return the assignments of variables that make only these GPUs visible to a process.

    Args:
        variables: those of the machine, such as the order of its GPUs (``Hardware.variables``).
    """
    return f"{variables} {_VISIBLE}={','.join(map(str, gpus))}".lstrip()


def shell_script(comment: str, command: str, *before: str) -> str:
    """Return a shell script that appends its arguments to a command.

    Args:
        comment: explanation for the user, one line.
        command: the command in shell syntax.
        before: lines that set variables for the command.
    """
    # exec replaces the shell, so that a signal to the script reaches the command.
    lines = ["#!/usr/bin/env bash", f"# {one_line(comment)}", "set -euo pipefail", *before]
    return "\n".join([*lines, f'exec env {command} "$@"']) + "\n"
