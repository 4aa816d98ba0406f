"""Enables accelerate's gradient scaling for float16 on the virtual GPU."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch


@contextmanager
def scaling_as_on_cuda(device_type: str) -> Iterator[None]:
    """Patch ``accelerate.Accelerator`` to scale float16 gradients on the device as it does on CUDA.

    ``Accelerator.__init__`` has a list of the device types that it scales on, and ``get_grad_scaler`` checks for their
    drivers.
    """
    module = sys.modules.get("accelerate.accelerator")
    if module is None:
        yield
        return
    build = module.Accelerator.__init__

    @functools.wraps(build)
    def built(accelerator: Any, *args: Any, **kwargs: Any) -> None:
        def scaler(distributed_type: Any = None, **words: Any) -> torch.amp.GradScaler:
            return torch.amp.GradScaler(device_type, **words)

        with (
            mock.patch.object(module.Accelerator, "device", torch.device("cuda")),
            mock.patch.object(module, "get_grad_scaler", scaler),
        ):
            build(accelerator, *args, **kwargs)

    with mock.patch.object(module.Accelerator, "__init__", built):
        yield
