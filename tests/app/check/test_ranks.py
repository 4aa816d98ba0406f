"""The processes of a training agree through their process group's store, or all get the same error."""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import DistributedType, TorchDynamoPlugin

import autotune
from autotune.api import ranks
from autotune.api.check import DRY_RUN
from autotune.api.preflight import _FirstRankReply
from autotune.api.ranks import RanksError, StoreRanks, ranks_of
from autotune.api.running import launching_of
from autotune.core.documents.verdict import Need, Outcome, Source, Verdict
from autotune.errors import AutotuneError, InputError

ENDED = "its connection ended"


class LostStore:
    """A store whose host has gone."""

    def __getattr__(self, name: str) -> Any:
        def lost(*_: object) -> None:
            raise RuntimeError(ENDED)

        return lost


@pytest.fixture
def store() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=120))


def run(*each: Callable[[], Any]) -> list[Any]:
    """Return what functions return, or raise, that run at the same time."""
    found: dict[int, Any] = {}

    def of(number: int) -> None:
        try:
            found[number] = each[number]()
        except AutotuneError as error:
            found[number] = error

    threads = [threading.Thread(target=of, args=(number,)) for number in range(len(each))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[number] for number in range(len(each))]


def meeting(store: Any, count: int, monkeypatch: pytest.MonkeyPatch) -> list[StoreRanks]:
    """Return the processes of a training, which all have started as many checks."""
    made = []
    for rank in range(count):
        monkeypatch.setattr(ranks, "_CHECKS", iter([7]))
        # Each process has a connection of its own, or the host's.
        own = store if rank == 0 else dist.TCPStore("127.0.0.1", store.port, is_master=False)
        made.append(StoreRanks(dist.PrefixStore("default_pg", own), rank, count))
    return made


def test_the_first_gets_what_all_have_and_all_get_what_it_says(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def of(each: StoreRanks) -> Callable[[], Any]:
        def agree() -> Any:
            time.sleep(0.05 * each.rank)
            return each.gather({"rank": each.rank}), each.broadcast("fits" if each.rank == 0 else None)

        return agree

    assert run(*map(of, meeting(store, 3, monkeypatch))) == [
        ([{"rank": 0}, {"rank": 1}, {"rank": 2}], "fits"),
        ([{"rank": 1}], "fits"),
        ([{"rank": 2}], "fits"),
    ]


def test_a_verdict_reaches_the_others(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = meeting(store, 2, monkeypatch)
    said = _FirstRankReply(verdict=Verdict(Outcome.FITS, "fits", need=Need(Source.TRACED, 5, 4, 6, 1, 2)))
    assert run(lambda: first.broadcast(said), lambda: second.broadcast(_FirstRankReply())) == [said, said]


def test_what_runs_code_when_it_is_unpickled_is_not_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_CHECKS", iter([7]))
    store = dist.HashStore()
    store.set("autotune/7/0", pickle.dumps(_FirstRankReply()))
    with pytest.raises(RanksError, match="cannot be read"):
        StoreRanks(store, 1, 2).broadcast(_FirstRankReply())


def test_a_process_that_does_not_come_keeps_none_waiting_for_ever(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_ARRIVAL_SECONDS", 0.2)
    first, second, _ = meeting(store, 3, monkeypatch)

    def checks() -> Any:
        callback = autotune.PreflightCallback(memory_budget="1GiB", when_unsure="fail")
        return callback._agree(SimpleNamespace(), None, {}, first)

    def waits() -> Any:
        return autotune.PreflightCallback(memory_budget="1GiB")._agree(SimpleNamespace(), None, {}, second)

    found = run(checks, waits)
    assert "sent nothing for 0 s" in str(found[0])
    assert str(found[0]) == str(found[1])


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("xpu", "A training on xpu is not traced"),
        ("cuda", "The free memory of cuda cannot be read: CUDA error: device lost"),
    ],
)
def test_a_process_whose_free_memory_is_not_known_leaves_the_training_of_all_unchecked(
    rank: int, kind: str, why: str, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("CUDA error: device lost")

    def agrees(each: StoreRanks) -> Callable[[], Any]:
        args = SimpleNamespace(device=torch.device(kind if each.rank == rank else "cpu"))
        return lambda: autotune.PreflightCallback()._agree(args, None, {}, each)

    monkeypatch.setattr(torch.cuda, "mem_get_info", fail)
    first, second = run(*map(agrees, meeting(store, 2, monkeypatch)))
    assert isinstance(first, InputError)
    assert why in str(first)
    assert str(first) == str(second)


def test_a_store_that_is_gone_is_told() -> None:
    for rank in (0, 1):
        apart = StoreRanks(LostStore(), rank, 2)
        with pytest.raises(RanksError, match=f"cannot reach the store of their process group: {ENDED}"):
            apart.gather(rank)
        with pytest.raises(RanksError, match=ENDED):
            apart.broadcast(rank)


@pytest.mark.parametrize("rank", [0, 1])
def test_processes_that_cannot_agree_train_and_the_first_says_why(rank: int, caplog: pytest.LogCaptureFixture) -> None:
    args: Any = SimpleNamespace(world_size=2, process_index=rank)
    autotune.PreflightCallback().on_train_begin(args, None, None)
    why = "The 2 processes of this training have no process group of PyTorch."
    said = [f"autotune cannot check this training: {why} {DRY_RUN}"]
    assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == said[rank:]
    with pytest.raises(AutotuneError, match="have no process group"):
        autotune.PreflightCallback(when_unsure="fail").on_train_begin(args, None, None)


def test_no_connections_are_made_beside_those_of_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("gloo: cannot resolve this machine's name")

    monkeypatch.setattr(dist, "new_group", refuse)
    kept = dist.HashStore()
    dist.init_process_group("fake", store=kept, rank=0, world_size=2)
    try:
        met = ranks_of(SimpleNamespace(world_size=2))
        assert met.broadcast("fits") == "fits"
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("environment", "machines"),
    [
        ({"LOCAL_WORLD_SIZE": "4"}, 2),
        ({"LOCAL_SIZE": "4"}, 2),
        ({"LOCAL_WORLD_SIZE": "8", "LOCAL_SIZE": "4"}, 1),
        ({}, 1),
    ],
    ids=str,
)
def test_machines_are_counted_by_what_each_launcher_says(
    environment: dict[str, str], machines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    state = SimpleNamespace(distributed_type=DistributedType.MULTI_GPU, dynamo_plugin=TorchDynamoPlugin())
    assert launching_of(SimpleNamespace(world_size=8, mixed_precision="no"), state).machines == machines
