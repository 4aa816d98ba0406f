"""``sync_each_batch``: whether FSDP2 reduces gradients across processes in every micro-batch, or once per step."""

from __future__ import annotations

from autotune.core.candidate import Candidate, Choice
from autotune.core.setting import Setting
from autotune.techniques.base import OFF, ON, Distributed, Option
from autotune.techniques.per_device_train_batch_size import ROWS, rows_per_step
from autotune.techniques.sharding import FSDP2
from autotune.techniques.trace_impact import NO_PATCHES

SYNCED = "args.accelerator_config.gradient_accumulation_kwargs.sync_each_batch"
"""The entry of a plan."""


class SyncEachBatch(Distributed):
    """The key of that name in accelerate's ``GradientAccumulationPlugin``, which ``Trainer`` reads in its loop.

    DDP holds whole gradients in either case, and with DeepSpeed ``Trainer`` reduces them in every micro-batch.
    """

    summary = "Reduces FSDP2's gradients in each micro-batch, so that no process keeps whole gradients."
    options = (
        Option(OFF, "once per optimizer step, and until then each process holds whole gradients", entries={}),
        Option(ON, "in each micro-batch: each process holds its shard; more communication"),
    )
    trl_default = OFF
    needs = f"sharding={FSDP2}, and several micro-batches in an optimizer step"
    writes = frozenset({SYNCED})
    impact = NO_PATCHES

    def normal(self, choice: Choice, candidate: Candidate, setting: Setting) -> Choice:
        """Return ``off`` without FSDP2 or accumulation, unless the user's own configuration has ``on``."""
        accumulates = rows_per_step(candidate, setting) > int(candidate[ROWS])
        used = candidate.get("sharding") == FSDP2 and accumulates
        return choice if used or setting.is_users_choice(self.name, choice) else OFF
