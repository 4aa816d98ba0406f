"""The two commands of a training whose completions a vLLM server generates on GPUs of its own."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from autotune.core.plan import TrainingPlan

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_MAIN = "main"


def serve_command(model: str, gpus: int, max_tokens: int | None, revision: str = _MAIN) -> str:
    """Return the command that starts the server on the first GPUs of a machine.

    The options are those of ``ScriptArguments`` (``trl/scripts/vllm_serve.py``, TRL 1.16). TRL sets the rest as its
    trainers need it, the transfer of weights among it. Dense models take no ``data_parallel_size`` above 1, so all GPUs
    are one tensor-parallel group.

    Args:
        max_tokens: of the longest prompt with its completion; None: what the model was made for.
    """
    words = ["trl", "vllm-serve", "--model", model, "--tensor-parallel-size", str(gpus)]
    words += ["--max-model-len", str(max_tokens)] if max_tokens is not None else []
    words += ["--revision", revision] if revision != _MAIN else []
    return f"{_visible(range(gpus))} {shlex.join(words)}"


def train_command(plan: TrainingPlan, first_gpu: int, *, by_command: bool) -> str:
    """Return the command that trains on the GPUs after those of the server, once that runs.

    Args:
        plan: of the training, with ``vllm_mode`` ``server``.
        by_command: whether ``trl`` has a command for the trainer; else it is the bundle's script that is started.
    """
    count = plan.launch.processes
    processes = ["--num_processes", str(count)]
    words = ["accelerate", "launch", *processes, "train.py"]
    if by_command:
        words = ["trl", plan.trainer, "--config", "config.yaml", *processes]
        words += ["--use_vllm", "True", "--vllm_mode", str(plan.args["vllm_mode"])]
    return f"{_visible(range(first_gpu, first_gpu + count))} {shlex.join(words)}"


def _visible(gpus: Iterable[int]) -> str:
    return f"{_VISIBLE}={','.join(map(str, gpus))}"
