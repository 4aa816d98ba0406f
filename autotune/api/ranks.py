"""Exchanges values between the ranks of a running training."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from autotune.core.codec import DecodeError, decode, encode
from autotune.core.json_text import read_json
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
_MEETINGS = itertools.count()


class RanksError(AutotuneError):
    """The processes of a training cannot exchange messages."""


class StoreRanks:
    """One process's view of all processes of a training; all processes must call the same methods in the same order.

    They exchange JSON values or dataclasses, one per process, through the key-value store of PyTorch's process group.
    Each method may raise a :class:`RanksError`.

    A separate process group would need connections between all processes that the training may lack: gloo's fail where
    a machine's name does not resolve. The store is polled, since a blocking call would lock out PyTorch's watchdogs.

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
        self._name = f"autotune/{next(_MEETINGS)}"
        self._exchanges = itertools.count()

    def gathered(self, own: _Value) -> list[_Value]:
        """Gather: return the values of all ranks, in order, on rank 0, and the own value on other ranks."""
        if self._store is None:
            return [own]
        name = self._next()
        keys = [f"{name}/{rank}" for rank in range(self._processes)]
        self._put(keys[self.rank], own)
        if self.rank > 0:
            return [own]
        return self._taken(keys, _ARRIVAL_SECONDS)

    def broadcast(self, own: _Value) -> _Value:
        """Broadcast: return rank 0's value on every rank."""
        if self._store is None:
            return own
        key = self._next()
        if self.rank == 0:
            self._put(key, own)
            return own
        (found,) = self._taken([key], _PATIENCE_SECONDS)
        try:
            return decode(type(own), found) if dataclasses.is_dataclass(own) else found
        except DecodeError as error:
            raise RanksError(f"The processes of this training run different versions of autotune: {error}.") from error

    def _next(self) -> str:
        return f"{self._name}/{next(self._exchanges)}"

    def _put(self, key: str, value: object) -> None:
        try:
            # JSON, since any process that reaches the store could write a pickle that runs code.
            self._store.set(key, json.dumps(encode(value)).encode())
        except RuntimeError as error:
            raise _lost(error) from error

    def _taken(self, keys: Sequence[str], seconds: float) -> list[Any]:
        """Wait for keys and return their values."""
        ends, pause = time.monotonic() + seconds, _PAUSES_SECONDS[0]
        try:
            while not self._store.check(list(keys)):
                if time.monotonic() > ends:
                    raise RanksError(f"The other processes of this training sent nothing for {seconds:,.0f} s.")
                time.sleep(pause)
                pause = min(2 * pause, _PAUSES_SECONDS[1])
            return [read_json(self._store.get(key)) for key in keys]
        except RuntimeError as error:
            raise _lost(error) from error
        except ValueError as error:
            raise RanksError(f"A message from another process of this training cannot be read: {error}.") from error


def ranks_of(args: transformers.TrainingArguments) -> StoreRanks:
    """Return the processes of a training that is about to start.

    Raises:
        RanksError: they have no process group, or it has no store.
    """
    if args.world_size == 1:
        return StoreRanks(None, 0, 1)
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        raise RanksError(f"The {args.world_size} processes of this training have no group of PyTorch's.")
    try:
        store = dist.group.WORLD.get_group_store()
    except (RuntimeError, AttributeError) as error:
        raise RanksError(f"The group of this training's processes has no store: {error}") from error
    return StoreRanks(store, dist.get_rank(), dist.get_world_size())


def _lost(error: RuntimeError) -> RanksError:
    message = " ".join(str(error).split())
    return RanksError(f"The processes of this training cannot reach the store of their group: {message}")
