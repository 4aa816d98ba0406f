"""Streams and events of the virtual device; the caching allocator has separate free lists per stream."""

from __future__ import annotations

from itertools import count
from typing import Any


class Event:
    """A stream event that is always complete."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        """Do nothing: the event is complete."""

    def wait(self, stream: Any = None) -> None:
        """Do nothing: the event is complete."""

    def query(self) -> bool:
        """Return True: the event is complete."""
        return True

    def synchronize(self) -> None:
        """Do nothing: the event is complete."""


class Stream(Event):
    """A stream without pending work; as a context manager, it becomes the current stream.

    FSDP2 gathers and reduces on its own streams (``torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py``,
    ``FSDPCommContext``); TRL's ``activation_offloading.py`` copies activations back on another. A block that was freed
    on one stream is not reused on another (``c10/cuda/CUDACachingAllocator.cpp``, ``get_free_block``).

    Attributes:
        stream_id: unique in this process; 0 for the default stream.
    """

    stream_id = 0
    device_index = 0
    device_type = 20  # PrivateUse1 of c10/core/DeviceType.h (PyTorch 2.15)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.stream_id = next(_numbers)

    def wait_stream(self, stream: Any) -> None:
        """Do nothing: the other stream has no pending work."""

    def wait_event(self, event: Any) -> None:
        """Do nothing: the event is complete."""

    def record_event(self, event: Any = None) -> Event:
        """Return a complete event."""
        return event or Event()

    def is_capturing(self) -> bool:
        """Return False: no graph is captured. From PyTorch 2.15 on, Adam calls this on every accelerator."""
        return False

    def __enter__(self) -> Stream:
        _entered.append(self)
        return self

    def __exit__(self, *error: Any) -> None:
        _entered.pop()


_numbers = count()
_entered = [Stream()]


def current_stream(device: Any = None) -> Stream:
    """Return the stream that was entered last."""
    return _entered[-1]


def default_stream(device: Any = None) -> Stream:
    """Return the stream that is current if none was entered."""
    return _entered[0]
