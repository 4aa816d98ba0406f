"""Sets a plan's environment variables in the process that trains, after libraries were imported."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from autotune.core.plan import ALLOCATOR_VARIABLE


def set_environment(env: Mapping[str, str]) -> None:
    """Set environment variables; call it before the device is used.

    PyTorch reads the allocator's variable when it first asks for a setting (c10/core/AllocatorConfig.h), which the
    process that this one was forked from may have done. So its settings are applied here too.
    """
    os.environ.update(env)
    if ALLOCATOR_VARIABLE in env:
        torch._C._accelerator_setAllocatorSettings(env[ALLOCATOR_VARIABLE])
