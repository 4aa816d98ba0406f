"""Numbers the streams of the virtual device: the caching allocator keeps the memory of each stream apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from unittest import mock

import torch

from autotune.virtual import device
from autotune.virtual.ledger import Ledger


@contextmanager
def numbered_streams(ledger: Ledger) -> Iterator[None]:
    """Record on which stream the device's memory is allocated.

    FSDP2 gathers and reduces on streams of its own (``torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py``,
    ``FSDPCommContext``), and activations that were offloaded come back on one (TRL's
    ``activation_offloading.py``).
    A block that was freed on one stream is not used on another (``c10/cuda/CUDACachingAllocator.cpp``,
    ``get_free_block``).
    """
    numbers = count(1)

    class Stream(device.Stream):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.stream_id = next(numbers)
            self._before: list[int] = []

        def __enter__(self) -> Stream:
            self._before.append(ledger.stream)
            ledger.stream = self.stream_id
            return self

        def __exit__(self, *error: Any) -> None:
            ledger.stream = self._before.pop()

    default = Stream()
    default.stream_id = 0
    known = {0: default}

    def current(_device: Any = None) -> Stream:
        return known[ledger.stream]

    made = Stream.__enter__

    def entered(stream: Stream) -> Stream:
        known[stream.stream_id] = stream
        return made(stream)

    def given(stream: Stream | None) -> Stream:
        return current() if stream is None else stream

    def first(_device: Any = None) -> Stream:
        return default

    functions: dict[str, Any] = {"Stream": Stream, "stream": given, "current_stream": current, "default_stream": first}
    with (
        mock.patch.object(Stream, "__enter__", entered),
        mock.patch.multiple(device.MODULE, **functions),
        # FSDP2 waits by this name for weights that it has gathered ahead and not used.
        mock.patch.object(torch.accelerator, "current_stream", current),
    ):
        yield
