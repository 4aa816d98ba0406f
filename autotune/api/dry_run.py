"""``autotune.dry_run``: runs a training script for a few steps on null GPUs, and says whether it fits."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.app.dry_run import STEPS
from autotune.app.dry_run import dry_run as ran_dry
from autotune.core.dry_run import DryRun
from autotune.core.events import Listener, ignore


def dry_run(
    command: Sequence[str],
    *,
    gpu: str | None = None,
    num_processes: int | None = None,
    steps: int = STEPS,
    as_shuffled: bool = False,
    timeout: str | float | None = None,
    listener: Listener = ignore,
) -> DryRun:
    """Run a training command on null GPUs, which compute nothing and count memory, until it has taken a few steps.

    The command runs as it is, with the Python or launcher that it names, whose environment needs PyTorch's CUDA build.
    No GPU is needed. What it prints goes to stderr. It ends after the last step; what it does before is done for real.

    Args:
        command: its words, such as ``["accelerate", "launch", "train.py"]``.
        gpu: name of a GPU, such as ``H100-80GB``, or a size such as ``24GiB``; None: this machine's.
        num_processes: how many GPUs there are; None: one for each process that the command says it starts.
        steps: optimizer steps after which it ends.
        as_shuffled: whether rows come as the script shuffles them; otherwise each batch has the largest of them.
        timeout: time after which it is ended, such as ``10m`` or in seconds; None: no limit.
        listener: is told what happens.

    Returns:
        The result, whatever it is: its ``outcome`` says whether it fits.

    Raises:
        InputError: something that was given cannot be used, or an environment lacks what null GPUs need.
        AutotuneError: the library of the null GPUs could not be built.
    """
    return ran_dry(
        tuple(command),
        gpu=gpu,
        num_processes=num_processes,
        steps=steps,
        as_shuffled=as_shuffled,
        timeout=timeout,
        listener=listener,
    )
