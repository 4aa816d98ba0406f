"""Runs a trace in a separate process if this one has CUDA, which a virtual GPU would break.

PyTorch has one accelerator per process besides the CPU, and a registered one cannot be removed: once the virtual GPU is
registered, a backward pass on CUDA fails in the autograd engine (``at::getAccelerator`` prefers the registered one, so
that CUDA's nodes have no stream). The process of the trace sees no GPU. What is traced is pickled with dill, by value
where it is defined in ``__main__`` or in a function.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import dill
import torch

from autotune.core.files import written_atomically
from autotune.core.scratch import scratch_folder
from autotune.virtual.records import Trace

REQUEST, REPLY = "request", "reply"
"""Files in the folder that the child gets: the pickled function with the options of the trace, and a :class:`Trace`, or
the exception that was raised."""
_CHILD = "autotune.virtual.child"
_INSTEAD = (
    "Let it build everything that it uses itself, without generators, open files or CUDA tensors from outside, or "
    "trace in a process that sees no GPU (CUDA_VISIBLE_DEVICES='')."
)


class HandOverError(RuntimeError):
    """The traced function cannot be pickled, or not unpickled in the process of the trace."""


def must_trace_in_subprocess() -> bool:
    """Whether this process has CUDA devices; the check initialises CUDA only without NVML."""
    return bool(torch.cuda.device_count())


def trace_in_subprocess(fn: Callable[[torch.device], object], options: Mapping[str, Any]) -> Trace:
    """Trace a function in a process of its own, and wait for it.

    The process has this one's environment, folder and import path, and PyTorch's defaults. What the function changes
    outside itself is changed there only.

    Args:
        fn: the function of a device.
        options: named arguments of :func:`autotune.virtual.tracing.trace`.

    Raises:
        HandOverError: the function cannot be handed over.
        RuntimeError: the process ended without a reply.
        Exception: whatever the trace raised, with its traceback as a note.
    """
    with scratch_folder() as name:
        folder = Path(name)
        try:
            folder.joinpath(REQUEST).write_bytes(dill.dumps((fn, dict(options)), recurse=True))
        except Exception as error:
            raise HandOverError(f"The traced function cannot be pickled ({_error_text(error)}). {_INSTEAD}") from error
        paths = [path or str(Path.cwd()) for path in sys.path]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(paths)}
        done = subprocess.run([sys.executable, "-m", _CHILD, name], env=environment, check=False)
        if not folder.joinpath(REPLY).exists():
            raise RuntimeError(f"The process of the trace ended with exit status {done.returncode} and no reply.")
        reply = pickle.loads(folder.joinpath(REPLY).read_bytes())
    if isinstance(reply, Trace):
        return reply
    raise reply


def read_request(folder: Path) -> tuple[Callable[[torch.device], object], dict[str, Any]]:
    """Return the function and the options that a request has.

    Raises:
        HandOverError: they cannot be unpickled in this process.
    """
    try:
        fn, options = dill.loads(folder.joinpath(REQUEST).read_bytes())
    except Exception as error:
        raise HandOverError(f"The traced function cannot be unpickled ({_error_text(error)}). {_INSTEAD}") from error
    return fn, options


def write_reply(folder: Path, reply: Trace | Exception) -> None:
    """Write the reply; an exception that cannot be pickled becomes a RuntimeError of the same words."""
    try:
        written = pickle.dumps(reply)
        pickle.loads(written)
    except Exception:
        if not isinstance(reply, Exception):
            raise
        stand_in = RuntimeError(_error_text(reply))
        for note in getattr(reply, "__notes__", ()):
            stand_in.add_note(note)
        written = pickle.dumps(stand_in)
    with written_atomically(folder / REPLY) as part:
        part.write_bytes(written)


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
