"""Gives fake storages addresses: libraries that save tensors find shared memory by addresses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch


@contextmanager
def addresses() -> Iterator[None]:
    """Make addresses of fake tensors differ where their storages differ; they point to no memory."""
    with (
        mock.patch.object(torch.Tensor, "data_ptr", _of_tensor),
        mock.patch.object(torch.UntypedStorage, "data_ptr", _of_storage),
    ):
        yield


def _of_storage(storage: torch.UntypedStorage) -> int:
    # The address of the storage's own record: one for each storage, and shared by its views.
    return int(storage._cdata)


def _of_tensor(tensor: torch.Tensor) -> int:
    return _of_storage(tensor.untyped_storage()) + int(tensor.storage_offset() * tensor.element_size())
