"""The streams of the virtual device: the caching allocator keeps the memory of each stream apart."""

from __future__ import annotations

from itertools import count
from typing import Any


class Event:
    """An event that has happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        """Do nothing: it has happened."""

    def wait(self, stream: Any = None) -> None:
        """Do nothing: it has happened."""

    def query(self) -> bool:
        """Return True: it has happened."""
        return True

    def synchronize(self) -> None:
        """Do nothing: it has happened."""


class Stream(Event):
    """A stream on which all work is already done; as a context manager, it is the current stream.

    FSDP2 gathers and reduces on streams of its own (``torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py``,
    ``FSDPCommContext``), and activations that were offloaded come back on one (TRL's ``activation_offloading.py``).
    A block that was freed on one stream is not used on another (``c10/cuda/CUDACachingAllocator.cpp``,
    ``get_free_block``).

    Attributes:
        stream_id: its number, which no other stream of this process has; 0 is the default stream's.
    """

    stream_id = 0
    device_index = 0
    device_type = 20  # PrivateUse1 of c10/core/DeviceType.h (PyTorch 2.15)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.stream_id = next(_numbers)

    def wait_stream(self, stream: Any) -> None:
        """Do nothing: that stream's work is done."""

    def wait_event(self, event: Any) -> None:
        """Do nothing: it has happened."""

    def record_event(self, event: Any = None) -> Event:
        """Return an event that has happened."""
        return event or Event()

    def is_capturing(self) -> bool:
        """Return False: no graph is captured. Adam calls this on every accelerator from PyTorch 2.15 on."""
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
    """Return the stream that is current where none was entered."""
    return _entered[0]
