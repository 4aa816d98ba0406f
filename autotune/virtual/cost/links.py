"""Communication time between ranks: over the links of a machine, and over the network between machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from autotune.core.gpu import GpuSpeeds
from autotune.core.plan import Launch

# For a long all-reduce over two machines, NCCL uses trees: each machine reduces the data of its ranks, and sends the
# result to the other once. Over three and more it uses rings (its maintainers:
# https://github.com/NVIDIA/nccl/issues/946, https://github.com/NVIDIA/nccl/issues/812 and
# https://github.com/NVIDIA/nccl-tests/issues/160).
_MACHINES_OF_TREES = 2


@dataclass(frozen=True, slots=True)
class Collective:
    """The ranks that take part in a collective operator.

    Attributes:
        ranks: the ranks of the group.
        all_reduce: whether it is an all-reduce. All other collectives use rings.
    """

    ranks: tuple[int, ...]
    all_reduce: bool = False


def sending_seconds(sent_bytes: int, collective: Collective | None, speeds: GpuSpeeds, launch: Launch) -> float:
    """Return how long a collective operator takes at the achieved rate of the links, without latency.

    A ring passes the same bytes through each of its ranks, so the slowest link is the bottleneck: that of a GPU, or the
    network of a machine, which each ring enters and leaves once (https://github.com/NVIDIA/nccl-tests/blob/master/doc/
    PERFORMANCE.md: bus bandwidth is that of the bottleneck, NVLink, PCI or network). Context parallelism also sends to
    the next rank. The traffic of an all-to-all between machines is underestimated. In-network reduction (SHARP) is not
    modelled.

    Args:
        sent_bytes: bytes that each rank sends.
        collective: the participating ranks; None: ranks of one machine.
        launch: distribution of ranks over machines. Ranks of a machine are consecutive, as torchrun numbers them.
    """
    link = speeds.nvlink if speeds.nvlink and _linked(collective, speeds, launch) else speeds.pcie
    together = launch.per_machine if collective is None else min(len(collective.ranks), launch.per_machine)
    within = sent_bytes / (link * speeds.achieved.link_share(together))
    if collective is None or speeds.network is None or launch.machines == 1:
        return within
    return max(within, sent_bytes * network_load(collective, launch) / speeds.network)


def _linked(collective: Collective | None, speeds: GpuSpeeds, launch: Launch) -> bool:
    """Return whether NVLink connects the ranks of a group within each machine; bridges connect neighbours only."""
    if speeds.bridged is None:
        return True
    if collective is None:
        return launch.per_machine <= speeds.bridged
    return len({rank // speeds.bridged for rank in collective.ranks}) == 1


@lru_cache(maxsize=256)
def network_load(collective: Collective, launch: Launch) -> float:
    """Return the bytes that a machine sends over its network per byte that a rank sends; 0 within one machine.

    All groups of a mesh run their collectives at the same time and share the networks of their machines. Example: with
    as many replicas as machines, each rank of a machine belongs to a different group that reduces gradients. If groups
    differ, the highest load is returned.
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
    """Yield all groups of the device mesh that contains a group.

    The ranks of a group have a constant stride if the group spans one mesh dimension, or neighbouring ones.
    ``ParallelismConfig`` of accelerate orders the dimensions: replicas, shards, parts of a row. A group without a
    constant stride is assumed to be the only one.
    """
    first, step = ranks[0], ranks[1] - ranks[0] if len(ranks) > 1 else 1
    block = len(ranks) * step
    if step < 1 or ranks != tuple(range(first, first + block, step)):
        yield ranks
        return
    for start in range(first % block // step * step, processes - block + 1, block):
        yield from (range(start + offset, start + block, step) for offset in range(step))
