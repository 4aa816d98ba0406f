"""Runs a trace in a subprocess if this process has CUDA devices, because registering the virtual GPU breaks CUDA.

PyTorch supports one accelerator per process besides the CPU, and a registered one cannot be removed: after the virtual
GPU is registered, a backward pass on CUDA fails in the autograd engine (``at::getAccelerator`` prefers the registered
device, so CUDA's nodes have no stream). The subprocess sees no GPU. The traced function is pickled with dill: by value
if it is defined in ``__main__`` or in a function.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import dill

from autotune.core.files.atomic import written_atomically
from autotune.core.files.scratch import scratch_folder
from autotune.virtual.recording.records import Trace

_REQUEST, _REPLY = "request", "reply"
"""File names in the folder that both processes share: the pickled call, and the pickled :class:`Trace` or exception."""
_INSTEAD = (
    "Let it build everything that it uses itself, without generators, open files or CUDA tensors from outside, or "
    "trace in a process that sees no GPU (CUDA_VISIBLE_DEVICES='')."
)


class PicklingError(RuntimeError):
    """The traced function cannot be pickled, or cannot be unpickled in the subprocess of the trace."""


def in_subprocess(trace: Callable[[], Trace]) -> Trace:
    """Run a trace in a subprocess and return its result.

    The subprocess inherits the environment, working directory and import path, but not PyTorch settings such as the
    default dtype. Side effects of the traced function stay in the subprocess.

    Args:
        trace: called in the subprocess; refers to the traced function.

    Raises:
        PicklingError: the function cannot be pickled or unpickled.
        RuntimeError: the subprocess ended without a reply.
        Exception: any exception of the trace, with its traceback as a note.
    """
    with scratch_folder() as name:
        folder = Path(name)
        try:
            folder.joinpath(_REQUEST).write_bytes(dill.dumps(trace, recurse=True))
        except Exception as error:
            raise PicklingError(f"The traced function cannot be pickled ({_error_text(error)}). {_INSTEAD}") from error
        paths = [path or str(Path.cwd()) for path in sys.path]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(paths)}
        code = f"from {__name__} import reply; reply({name!r})"
        done = subprocess.run([sys.executable, "-c", code], env=environment, check=False)
        if not folder.joinpath(_REPLY).exists():
            raise RuntimeError(f"The process of the trace ended with exit status {done.returncode} and no reply.")
        found = pickle.loads(folder.joinpath(_REPLY).read_bytes())
    if isinstance(found, Trace):
        return found
    raise found


def reply(folder: str) -> None:
    """Run the pickled call of a folder, in the subprocess, and write its result or exception there.

    An exception that cannot be pickled becomes a RuntimeError with the same message.
    """
    try:
        written = pickle.dumps(_unpickled(Path(folder, _REQUEST))())
    except Exception as error:  # noqa: BLE001 the parent raises it
        error.add_note("In the process of the trace:\n" + "".join(traceback.format_tb(error.__traceback__)))
        try:
            written = pickle.dumps(error)
            pickle.loads(written)
        except Exception:  # noqa: BLE001 pickling hooks may raise anything
            stand_in = RuntimeError(_error_text(error))
            stand_in.__notes__ = error.__notes__
            written = pickle.dumps(stand_in)
    with written_atomically(Path(folder, _REPLY)) as part:
        part.write_bytes(written)


def _unpickled(request: Path) -> Callable[[], Trace]:
    try:
        trace: Callable[[], Trace] = dill.loads(request.read_bytes())
    except Exception as error:
        raise PicklingError(f"The traced function cannot be unpickled ({_error_text(error)}). {_INSTEAD}") from error
    return trace


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
