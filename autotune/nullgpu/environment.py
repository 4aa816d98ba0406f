"""The environment variables that give a process null GPUs in place of NVIDIA's driver and libraries."""

from __future__ import annotations

import os
from pathlib import Path

from autotune.nullgpu.build import SONAMES, build_library
from autotune.nullgpu.devices import NullDevice

_HOOKS = Path(__file__).parent / "hook"


def environment(
    device: NullDevice,
    *,
    count: int = 1,
    table: Path | None = None,
    alone: bool = False,
    folder: Path | None = None,
) -> dict[str, str]:
    """Return this process's environment plus the variables of null GPUs; child processes inherit them.

    Args:
        device: the properties of every GPU.
        count: number of GPUs.
        table: file with each process's allocations, created on first use; processes with one table share the GPUs.
            None: one table for all processes of this user.
        alone: one process stands for all ranks of a distributed run.
        folder: folder of the library; None: build it for this interpreter, or take it from the cache.

    Raises:
        InputError: this machine lacks a requirement of null GPUs.
        AutotuneError: the library could not be built.
    """
    folder = folder or build_library()
    variables = dict(os.environ)
    variables.pop("CUDA_VISIBLE_DEVICES", None)
    sonames = (folder / SONAMES).read_text(encoding="utf-8").split()
    # PyTorch's RPATH would find NVIDIA's libraries first where pip has installed them. The loader resolves a soname to
    # a preloaded library of that name before it looks at an RPATH; it finds the preloaded one by LD_LIBRARY_PATH.
    _prepend(variables, "LD_LIBRARY_PATH", str(folder))
    _prepend(variables, "LD_PRELOAD", *sonames)
    variables["TRITON_LIBCUDA_PATH"] = str(folder)
    # The library puts it into PYTHONPATH, which commands such as ``env PYTHONPATH=src python train.py`` replace.
    variables["NULLGPU_HOOKS"] = str(_HOOKS)
    variables["NULLGPU_DEVICE"] = device.text()
    variables["NULLGPU_COUNT"] = str(count)
    variables["NULLGPU_ALONE"] = str(int(alone))
    if table is not None:
        variables["NULLGPU_TABLE"] = str(table.absolute())
    return variables


def _prepend(variables: dict[str, str], name: str, *words: str) -> None:
    """Put words before the colon-separated words of a variable, without duplicates."""
    others = [word for word in variables.get(name, "").split(":") if word and word not in words]
    variables[name] = ":".join([*words, *others])
