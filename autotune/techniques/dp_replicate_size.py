"""``dp_replicate_size``: hybrid sharding with several replicas of the model, each sharded in a group of processes."""

from __future__ import annotations

from autotune.core.candidate import Candidate, Choice
from autotune.core.machine import GPUS_PER_MACHINE
from autotune.core.setting import Setting
from autotune.techniques.base import POSITIVE, Distributed, Option
from autotune.techniques.context_parallel import ranks_per_row
from autotune.techniques.sharding import DDP, FSDP2

NAME = "dp_replicate_size"


class DpReplicateSize(Distributed):
    """``dp_replicate_size`` of accelerate's ``ParallelismConfig``; the rest of the processes shards each replica."""

    summary = "Number of replicas in hybrid sharding, each sharded within a group of processes."
    options = (
        Option(1, "one group: the model is sharded among all processes", entries={}),
        Option(2, "two groups, such as two machines; any number that divides the processes", family=POSITIVE),
        Option(4, "four groups"),
    )
    # Within a machine, all links are equally fast and replicas save no time, so only a fixed choice is used.
    fewest_processes = GPUS_PER_MACHINE + 1
    needs = f"sharding={FSDP2}, and at least two processes in each group"
    writes = frozenset({"args.parallelism_config.dp_replicate_size"})

    def unsuitable(self, choice: Choice, setting: Setting) -> str | None:
        """Return a reason if the processes cannot be divided into so many groups of two or more."""
        processes, groups = setting.machine.hardware.processes, int(choice)
        if groups == 1:
            return None
        if processes % groups:
            return f"{processes} processes cannot be divided into {groups} equal groups (--num-processes)"
        if processes == groups:
            return f"each of the {groups} groups would be one process, which shards nothing: that is sharding={DDP}"
        return None

    def normal(self, choice: Choice, candidate: Candidate, setting: Setting) -> Choice:
        """Return 1 without FSDP2, unless the user fixed a number: then the conflict is reported."""
        return choice if NAME in setting.fixed or candidate.get("sharding", DDP) == FSDP2 else 1

    def conflict(self, choice: Choice, candidate: Candidate, setting: Setting) -> str | None:
        """Return a reason if the engine makes no groups, or a replica has only the processes that share a row."""
        if choice == 1:
            return None
        if candidate.get("sharding", DDP) != FSDP2:
            return f"{NAME}={choice} needs sharding={FSDP2}: accelerate makes groups only with it"
        processes, shared = setting.machine.hardware.processes, ranks_per_row(candidate)
        if processes % (int(choice) * shared) or processes == int(choice) * shared:
            # ParallelismConfig.__post_init__ of accelerate.
            return (
                f"{NAME}={choice} with context_parallel={shared} leaves {processes / int(choice) / shared:g} of "
                f"{processes} processes to shard, and accelerate needs a whole number above 1"
            )
        return None
