"""The environment of a process that is to find null GPUs in place of NVIDIA's driver and libraries."""

from __future__ import annotations

import os
from pathlib import Path

from autotune.nullgpu.build import SONAMES, built
from autotune.nullgpu.devices import NullDevice

_HOOK = Path(__file__).parent / "hook"


def environment(
    device: NullDevice,
    *,
    count: int = 1,
    table: Path | None = None,
    alone: bool = False,
    folder: Path | None = None,
) -> dict[str, str]:
    """Return this environment for a process that finds null GPUs; those that it starts find them too.

    Builds the library where none is given and it is not in the cache yet.

    Args:
        device: what each GPU is; all are alike.
        count: how many GPUs there are.
        table: file in which processes keep what they hold, made on first use: those that share it share the GPUs. None:
            one for all processes of this user.
        alone: one process stands for all ranks of a distributed run.
        folder: with the library that the process finds; None: that for this environment.

    Raises:
        InputError: this machine lacks something that null GPUs need.
        AutotuneError: the library could not be built.
    """
    folder = folder or built()
    variables = dict(os.environ)
    variables.pop("CUDA_VISIBLE_DEVICES", None)
    sonames = (folder / SONAMES).read_text(encoding="utf-8").split()
    # Where pip has installed NVIDIA's libraries, PyTorch's RPATH would find those first: what is preloaded by a name is
    # what that name means. Preloading finds it through the library path, as nothing else gives it that name.
    _prepend(variables, "LD_LIBRARY_PATH", str(folder))
    _prepend(variables, "LD_PRELOAD", *sonames)
    _prepend(variables, "PYTHONPATH", str(_HOOK))
    variables["TRITON_LIBCUDA_PATH"] = str(folder)
    variables["NULLGPU_DEVICE"] = device.text()
    variables["NULLGPU_COUNT"] = str(count)
    variables["NULLGPU_ALONE"] = str(int(alone))
    if table is not None:
        variables["NULLGPU_TABLE"] = str(table.absolute())
    return variables


def _prepend(variables: dict[str, str], name: str, *words: str) -> None:
    """Put words before what a variable has, once."""
    others = [word for word in variables.get(name, "").split(":") if word and word not in words]
    variables[name] = ":".join([*words, *others])
