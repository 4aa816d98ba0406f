"""The time of communication between ranks: over the links of a machine, and over the network between machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from autotune.core.gpu import GpuSpeeds
from autotune.core.plan import Launch

# For two machines, NCCL takes trees for a long all-reduce: each machine adds up what its ranks have, and sends that to
# the other once. For three and more it takes rings (its maintainers: https://github.com/NVIDIA/nccl/issues/946,
# https://github.com/NVIDIA/nccl/issues/812 and https://github.com/NVIDIA/nccl-tests/issues/160).
_MACHINES_OF_TREES = 2


@dataclass(frozen=True, slots=True)
class Collective:
    """The ranks that take part in a collective operator.

    Attributes:
        ranks: the ranks of the group.
        all_reduce: whether it is an all-reduce. All others go round rings.
    """

    ranks: tuple[int, ...]
    all_reduce: bool = False


def sending_seconds(sent_bytes: int, collective: Collective | None, speeds: GpuSpeeds, launch: Launch) -> float:
    """Return how long a collective operator takes at the achieved rate of the links, without latency.

    A ring passes the same bytes through every one of its ranks, so the slowest link decides: that of a GPU, or the
    network of a machine, which each ring enters and leaves once (https://github.com/NVIDIA/nccl-tests/blob/master/doc/
    PERFORMANCE.md: bus bandwidth is that of the bottleneck, NVLink, PCI or network). What context parallelism exchanges
    goes to the next rank too. An exchange of all with all sends more between machines than is counted here. Switches
    that add up what passes through them (SHARP) are not counted on.

    Args:
        sent_bytes: bytes that each rank sends.
        collective: the ranks that take part; None: some of one machine.
        launch: distribution of ranks over machines. Those of a machine are consecutive, as torchrun numbers them.
    """
    link = speeds.nvlink if speeds.nvlink and _linked(collective, speeds, launch) else speeds.pcie
    together = launch.per_machine if collective is None else min(len(collective.ranks), launch.per_machine)
    within = sent_bytes / (link * speeds.achieved.linked(together))
    if collective is None or speeds.network is None or launch.machines == 1:
        return within
    return max(within, sent_bytes * network_load(collective, launch) / speeds.network)


def _linked(collective: Collective | None, speeds: GpuSpeeds, launch: Launch) -> bool:
    """Return whether NVLink joins all ranks of a group that are in one machine; bridges join neighbours."""
    if speeds.bridged is None:
        return True
    if collective is None:
        return launch.per_machine <= speeds.bridged
    return len({rank // speeds.bridged for rank in collective.ranks}) == 1


@lru_cache(maxsize=256)
def network_load(collective: Collective, launch: Launch) -> float:
    """Return the bytes that a machine sends over its network for each byte that a rank sends; 0 within a machine.

    All groups of a mesh run their collectives at the same time, and share the networks of their machines: with as many
    replicas as machines, each rank of a machine is in another group that reduces gradients. Where groups differ, it is
    the load of the slowest.
    """
    spread = [
        frozenset(rank // launch.per_machine for rank in group)
        for group in mesh_groups(collective.ranks, launch.processes)
    ]
    crossing = [machines for machines in spread if len(machines) > 1]
    groups = Counter(machine for machines in crossing for machine in machines)
    size = len(collective.ranks)

    def load(machines: frozenset[int]) -> float:
        trees = collective.all_reduce and len(machines) == _MACHINES_OF_TREES
        return max(groups[machine] for machine in machines) * (size / (2 * (size - 1)) if trees else 1.0)

    return max(map(load, crossing), default=0.0)


def mesh_groups(ranks: tuple[int, ...], processes: int) -> Iterator[range | tuple[int, ...]]:
    """Yield the groups of the mesh of processes that a group is part of.

    The groups of one dimension of a mesh, and of neighbouring dimensions together, have ranks at equal distances.
    ``ParallelismConfig`` of accelerate orders its dimensions as replicas, shards, parts of a row. A group without such
    a distance is taken to be alone.
    """
    first, step = ranks[0], ranks[1] - ranks[0] if len(ranks) > 1 else 1
    block = len(ranks) * step
    if step < 1 or ranks != tuple(range(first, first + block, step)):
        yield ranks
        return
    for start in range(first % block // step * step, processes - block + 1, block):
        yield from (range(start + offset, start + block, step) for offset in range(step))
