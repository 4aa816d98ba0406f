"""Communication time between ranks: the links of a machine, the network, and the sharing of both."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from accelerate import ParallelismConfig
from torch.distributed.device_mesh import DeviceMesh

from autotune.core.gpu import AchievedRates, GpuSpeeds
from autotune.core.plan import Launch
from autotune.inspection.gpus import find_gpu
from autotune.virtual.cost.links import Collective, mesh_groups, network_load, sending_seconds
from autotune.virtual.ranks import World, process_group

GBIT = 1e9 / 8
GIB = 2**30
FOUR = Launch(32, 4)
ALL = Collective(tuple(range(32)))
SHARDS = Collective(tuple(range(8)))
REPLICAS = Collective((0, 8, 16, 24))


def speeds(name: str, gbits: float | None = None) -> GpuSpeeds:
    """Return the speeds of a GPU in a machine with a network of so many Gbit/s, whose links reach all of theirs."""
    found = find_gpu(name).networked(gbits * GBIT if gbits is not None else None).speeds
    assert found is not None
    return replace(found, achieved=AchievedRates())


@pytest.mark.parametrize(("gbits", "bandwidth"), [(None, 450e9), (400, 50e9), (3200, 400e9), (6400, 450e9)])
def test_a_ring_is_as_fast_as_the_slowest_link_that_it_passes(gbits: float | None, bandwidth: float) -> None:
    # The best time of an all-gather of S bytes, of https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md:
    # S * (n - 1) / (B * n), where B is the bandwidth of each rank to the outside: that of the bottleneck.
    size, ranks = 8 * 10**9, 32
    sent = size * (ranks - 1) // ranks
    assert sending_seconds(sent, ALL, speeds("H100-SXM", gbits), FOUR) == pytest.approx(
        size * (ranks - 1) / (bandwidth * ranks)
    )


@pytest.mark.parametrize(
    ("ranks", "linked"),
    [((0, 1), True), ((2, 3), True), ((1, 2), False), ((0, 4), False), (tuple(range(4)), False)],
)
def test_a_bridge_joins_neighbouring_cards_and_all_others_send_over_pcie(ranks: tuple[int, ...], linked: bool) -> None:
    found = speeds("H100-PCIe")
    assert found.nvlink is not None
    rate = found.nvlink if linked else found.pcie
    assert sending_seconds(GIB, Collective(ranks), found, Launch(8)) == GIB / rate
    assert sending_seconds(GIB, None, found, Launch(8)) == GIB / found.pcie
    assert sending_seconds(GIB, None, found, Launch(2)) == GIB / found.nvlink


@pytest.mark.parametrize(
    ("name", "gpus", "bandwidth"),
    # Bus bandwidth in GB/s: https://github.com/NVIDIA/nccl/issues/1639, https://github.com/NVIDIA/nccl/issues/1161,
    # https://github.com/NVIDIA/nccl-tests/issues/178.
    [("RTX5090", 8, 28), ("RTX5090", 4, 35), ("H100-PCIe", 2, 116), ("A100-PCIe-80GB", 2, 208)],
)
def test_cards_without_a_switch_send_as_fast_as_has_been_measured(name: str, gpus: int, bandwidth: float) -> None:
    found = find_gpu(name).speeds
    assert found is not None
    seconds = sending_seconds(10**9, Collective(tuple(range(gpus))), found, Launch(gpus))
    assert seconds == pytest.approx(1 / bandwidth, rel=0.02)


@pytest.mark.parametrize(
    ("gpu", "machines", "gbits", "size", "seconds"),
    [
        # ztan-NCCL-test-result in https://github.com/lessizzmore/create-a3mega-ztan-fork: Google's A3 Mega, whose GPUs
        # have 8 links of 200 Gbit/s.
        ("H100-SXM", 2, 1600, 8 * GIB, 47535e-6),
        # https://github.com/NVIDIA/nccl/issues/1368: 4 of 400; 190 GB/s of bus bandwidth with rings, 150 with trees.
        ("H100-SXM", 5, 1600, GIB, 2 * 39 / 40 * GIB / 190e9),
    ],
    ids=["two machines", "five machines"],
)
def test_an_all_reduce_takes_as_long_as_has_been_measured_or_somewhat_less(
    gpu: str, machines: int, gbits: float, size: int, seconds: float
) -> None:
    ranks = 8 * machines
    sent = size * 2 * (ranks - 1) // ranks
    everyone = Collective(tuple(range(ranks)), all_reduce=True)
    predicted = sending_seconds(sent, everyone, speeds(gpu, gbits), Launch(ranks, machines))
    assert predicted <= seconds <= 1.15 * predicted


@pytest.mark.parametrize(
    ("collective", "launch", "load"),
    [
        (SHARDS, FOUR, 0),
        (ALL, FOUR, 1),
        # One group in each machine, and eight that have a rank in every machine.
        (REPLICAS, FOUR, 8),
        (Collective((3, 11, 19, 27)), FOUR, 8),
        # Two groups, each of which has two machines for itself.
        (Collective(tuple(range(16))), FOUR, 1),
        (Collective((0, 16)), FOUR, 8),
        # Eight ranks that share a row, in machines of four.
        (SHARDS, Launch(32, 8), 1),
        (Collective((0, 1)), FOUR, 0),
        # 12 ranks to a group, 8 to a machine: both groups have ranks in the second of three machines.
        (Collective(tuple(range(12))), Launch(24, 3), 2),
        # 6 to a group, 8 to a machine: the first group is in one machine, the next two meet in the second.
        (Collective(tuple(range(6))), Launch(24, 3), 2),
        # A group of no mesh.
        (Collective((0, 1, 9)), FOUR, 1),
    ],
)
def test_groups_that_send_at_the_same_time_share_the_network(
    collective: Collective, launch: Launch, load: float
) -> None:
    assert network_load(collective, launch) == load


def test_each_machine_of_two_sends_its_sum_once() -> None:
    # https://github.com/NVIDIA/nccl/issues/812: over the network, rings send 2 (n - 1) / n of a tensor, and trees all.
    for ranks in (4, 16):
        ring = 2 * (ranks - 1) / ranks
        both = Collective(tuple(range(ranks)), all_reduce=True)
        assert network_load(both, Launch(ranks, 2)) == pytest.approx(1 / ring)
        assert network_load(replace(both, all_reduce=False), Launch(ranks, 2)) == 1
    # Where each machine has one rank of a group, that is the same.
    assert network_load(Collective((0, 8), all_reduce=True), Launch(16, 2)) == 8


@pytest.mark.parametrize("collective", [ALL, SHARDS, REPLICAS, replace(ALL, all_reduce=True)])
def test_a_faster_network_never_takes_longer_and_at_last_the_links_of_a_machine_decide(collective: Collective) -> None:
    times = [sending_seconds(10**9, collective, speeds("H100-SXM", 10.0**power), FOUR) for power in range(10)]
    assert all(slower >= faster for slower, faster in pairwise(times))
    assert times[-1] == sending_seconds(10**9, collective, speeds("H100-SXM"), FOUR)


@pytest.mark.filterwarnings("ignore:Slicing a flattened dim")
@pytest.mark.parametrize("sizes", [(2, 4, 2), (4, 4, 1), (1, 8, 2), (1, 16, 1), (2, 8, 1)])
def test_the_groups_of_accelerates_mesh_are_known_from_one_of_them(sizes: tuple[int, int, int]) -> None:
    replicas, shards, parts = sizes
    with process_group(World(16, rank=0)):
        config = ParallelismConfig(dp_replicate_size=replicas, dp_shard_size=shards, cp_size=parts)
        mesh: DeviceMesh = config.build_device_mesh("cpu")
        names = mesh.mesh_dim_names
        assert names
        for dimension, name in enumerate(names):
            rows = mesh.mesh.movedim(dimension, -1).flatten(0, -2) if mesh.ndim > 1 else mesh.mesh[None]
            assert _found(mesh, name) == {tuple(row) for row in rows.tolist()}
        ranks = torch.arange(16)
        assert _found(mesh, "dp_cp") == {tuple(ranks.tolist())}
        assert _found(mesh, "dp_shard_cp") == {tuple(row) for row in ranks.view(replicas, -1).tolist()}
        assert _found(mesh, "dp") == {tuple(row) for row in ranks.view(-1, parts).T.tolist()}


def _found(mesh: DeviceMesh, name: str) -> set[tuple[int, ...]]:
    """Return the assumed groups of a dimension, beginning with that of the first rank."""
    own = tuple(torch.distributed.get_process_group_ranks(mesh[name].get_group()))
    return {tuple(group) for group in mesh_groups(own, 16)}
