"""Gathers and broadcasts values among the ranks of a running training, over the store of its process group."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from autotune.core.files.codec import DecodeError, decode, encode
from autotune.core.files.json_text import read_json
from autotune.errors import AutotuneError

if TYPE_CHECKING:
    import transformers

_Value = TypeVar("_Value")
# Processes reach the check at different times: each may have to build its part of the model first.
_ARRIVAL_SECONDS = 1800.0
# The first process's check may take longer than the time limit of the training's collectives. If that process ends, the
# others notice earlier: the launcher ends them, or the store is gone.
_PATIENCE_SECONDS = 86400.0
_PAUSES_SECONDS = (0.02, 1.0)
_CHECKS = itertools.count()


class RanksError(AutotuneError):
    """The processes of a training cannot exchange messages."""


class StoreRanks:
    """Collectives of JSON values or dataclasses over the key-value store of PyTorch's process group.

    All processes must call the same methods in the same order. Each method may raise a :class:`RanksError`.

    A process group of its own would need connections that the training may lack: gloo fails if a machine's name does
    not resolve. The store is polled, since a blocking call would block PyTorch's watchdogs.

    Args:
        store: PyTorch's key-value store; None for a single process.
        rank: the number of this process, from 0.
        processes: number of processes.
    """

    def __init__(self, store: Any, rank: int, processes: int) -> None:
        self.rank = rank
        self._store = store
        self._processes = processes
        # All processes start the same number of checks, so their counts agree.
        self._name = f"autotune/{next(_CHECKS)}"
        self._exchanges = itertools.count()

    def gather(self, value: _Value) -> list[_Value]:
        """Return the values of all ranks, in order, on rank 0; on other ranks, only ``value``."""
        if self._store is None:
            return [value]
        name = self._next_key()
        keys = [f"{name}/{rank}" for rank in range(self._processes)]
        self._set(keys[self.rank], value)
        if self.rank > 0:
            return [value]
        return [_decoded(value, found) for found in self._wait_for(keys, _ARRIVAL_SECONDS)]

    def broadcast(self, value: _Value) -> _Value:
        """Return rank 0's value on every rank."""
        if self._store is None:
            return value
        key = self._next_key()
        if self.rank == 0:
            self._set(key, value)
            return value
        (found,) = self._wait_for([key], _PATIENCE_SECONDS)
        return _decoded(value, found)

    def _next_key(self) -> str:
        return f"{self._name}/{next(self._exchanges)}"

    def _set(self, key: str, value: object) -> None:
        try:
            # JSON, since any process that reaches the store could write a pickle that runs code.
            self._store.set(key, json.dumps(encode(value)).encode())
        except RuntimeError as error:
            raise _store_error(error) from error

    def _wait_for(self, keys: Sequence[str], seconds: float) -> list[Any]:
        """Wait for keys and return their values."""
        ends, pause = time.monotonic() + seconds, _PAUSES_SECONDS[0]
        try:
            while not self._store.check(list(keys)):
                if time.monotonic() > ends:
                    raise RanksError(f"The other processes of this training sent nothing for {seconds:,.0f} s.")
                time.sleep(pause)
                pause = min(2 * pause, _PAUSES_SECONDS[1])
            return [read_json(self._store.get(key).decode("utf-8"), finite=False) for key in keys]
        except RuntimeError as error:
            raise _store_error(error) from error
        except ValueError as error:
            raise RanksError(f"A message from another process of this training cannot be read: {error}.") from error


def ranks_of(args: transformers.TrainingArguments) -> StoreRanks:
    """Return the collectives of a training that is about to start.

    Raises:
        RanksError: they have no process group, or it has no store.
    """
    if args.world_size == 1:
        return StoreRanks(None, 0, 1)
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        raise RanksError(f"The {args.world_size} processes of this training have no process group of PyTorch.")
    try:
        store = dist.group.WORLD.get_group_store()
    except (RuntimeError, AttributeError) as error:
        raise RanksError(f"The process group of this training has no store: {error}") from error
    return StoreRanks(store, dist.get_rank(), dist.get_world_size())


def _decoded(like: _Value, found: Any) -> _Value:
    """Return a received value as one of the same type as ``like``."""
    try:
        return decode(type(like), found) if dataclasses.is_dataclass(like) else found
    except DecodeError as error:
        raise RanksError(f"The processes of this training run different versions of autotune: {error}.") from error


def _store_error(error: RuntimeError) -> RanksError:
    message = " ".join(str(error).split())
    return RanksError(f"The processes of this training cannot reach the store of their process group: {message}")
