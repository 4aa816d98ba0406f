"""Checks the settings of PyTorch's caching allocator against the installed torch."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from autotune.errors import first_line

_HEADER = "include/c10/cuda/CUDAAllocatorConfig.h"
_SETTING = re.compile(r"[^,\[\]]+(?:\[[^]]*\])?")
"""A name with its value, which may be a list in brackets."""
_LOAD_TIME = "backend"
"""The setting that a CUDA build refuses to change in a process."""


def refused_settings(variable: str) -> str:
    """Return what torch refuses of the allocator's settings when CUDA is first used; empty if it accepts all.

    Changes the settings of this process. A build without CUDA skips settings that it lacks: names of CUDA's are those
    of its header, and all others have to be read, that is, refused with a value of no type.
    """
    text = (Path(torch.__file__).parent / _HEADER).read_text(encoding="utf-8")
    names = set(re.findall(r'"(\w+)"', re.sub(r'"\s+"', "", text)))
    for setting in _SETTING.findall("".join(variable.split())):
        name = setting.partition(":")[0]
        if name not in names and not _refused(f"{name}:~"):
            return f"there is no setting {name}."
        if name != _LOAD_TIME and (reason := _refused(setting)):
            return reason
    return ""


def _refused(setting: str) -> str:
    try:
        torch._C._accelerator_setAllocatorSettings(setting)
    except (RuntimeError, ValueError) as error:
        return first_line(error)
    return ""
