"""``optimizer``: the optimizer, which determines the size of its state."""

from __future__ import annotations

import re
from collections.abc import Mapping

from autotune.core.candidate import Candidate, Choice
from autotune.core.plan import NO_CHECKPOINTS, SAVING
from autotune.core.setting import Setting
from autotune.techniques.base import CrashReason, Effect, Option, Technique, option_of
from autotune.techniques.lora import has_adapters
from autotune.techniques.sharding import DDP, FSDP2, ZERO_STAGES
from autotune.techniques.trace_impact import NO_PATCHES

_ADAFACTOR, _ADAGRAD = "adafactor", "adagrad"
_BITSANDBYTES = "bitsandbytes"
_COUNT_OVERFLOW = 2**31
"""Number of elements from which on bitsandbytes' 32-bit count overflows (``backends/cuda/ops.py``, 0.50)."""
_PAGED = "paging moves optimizer state between a GPU and the host, and there is no GPU"


class Optimizer(Technique):
    """``optim`` of ``TrainingArguments``."""

    summary = "Chooses the optimizer; AdamW's state has two values for each trained weight, others have less."
    options = (
        Option("adamw_torch_fused", "AdamW in one fused kernel"),
        Option("adamw_torch", "AdamW with one kernel per group of tensors"),
        Option(
            "paged_adamw_32bit", "AdamW whose state may move to the host", package=_BITSANDBYTES, without_gpu=_PAGED
        ),
        Option(
            "adamw_bnb_8bit", "AdamW with 8-bit state (bitsandbytes)", Effect.CHANGES_TRAINING, package=_BITSANDBYTES
        ),
        Option(
            "paged_adamw_8bit",
            "AdamW with 8-bit state that may move to the host",
            Effect.CHANGES_TRAINING,
            package=_BITSANDBYTES,
            without_gpu=_PAGED,
        ),
        Option("adamw_torch_8bit", "AdamW with 8-bit state (torchao)", Effect.CHANGES_TRAINING, package="torchao"),
        Option("lion_8bit", "Lion with 8-bit state", Effect.CHANGES_TRAINING, package=_BITSANDBYTES),
        Option(_ADAFACTOR, "Adafactor: factored second moments, no first moments", Effect.CHANGES_TRAINING),
        Option("sgd", "SGD: no state", Effect.CHANGES_TRAINING),
        Option("rmsprop", "RMSprop: one fp32 copy of the trained weights", Effect.CHANGES_TRAINING),
        Option(_ADAGRAD, "Adagrad: one fp32 copy of the trained weights", Effect.CHANGES_TRAINING),
        Option(
            "lion_32bit",
            "Lion and other optimizers of bitsandbytes",
            Effect.CHANGES_TRAINING,
            re.compile(r"adamw_8bit|ademamix(_8bit)?|rmsprop_bnb(_(8|32)bit)?"),
            package=_BITSANDBYTES,
        ),
        Option(
            "paged_lion_32bit",
            "others of bitsandbytes whose state may move to the host",
            Effect.CHANGES_TRAINING,
            re.compile(r"paged_(lion_8bit|ademamix_(8|32)bit)"),
            package=_BITSANDBYTES,
            without_gpu=_PAGED,
        ),
    )
    needs = (
        "for 8-bit and paged ones and lion_32bit bitsandbytes, no FSDP2, and with zero1 and zero2 fewer than 2^31 "
        "weights for each process; for paged ones a GPU; for adafactor neither DeepSpeed nor FSDP2; for adagrad "
        "adapters with DeepSpeed, and no state in checkpoints with FSDP2; for adamw_torch_8bit torchao"
    )
    changes = "other update rules, or AdamW with its state rounded to 8 bits"
    writes = frozenset({"args.optim"})
    impact = NO_PATCHES

    def spellings(self, entries: Mapping[str, object], candidate: Candidate, setting: Setting) -> tuple[Choice, ...]:
        """Return the optimizer of a configuration, which an option may represent."""
        named = entries.get("args.optim")
        return (named,) if isinstance(named, str) else ()

    def conflict(self, choice: Choice, candidate: Candidate, setting: Setting) -> str | None:
        """Return a reason for an optimizer under an engine whose tensors it cannot update.

        DeepSpeed flattens each process's share of a parameter group into one tensor
        (``single_partition_of_fp32_groups`` of ``stage_1_and_2.py``, ``fp32_partitioned_groups_flat`` of
        ``stage3.py``, there of 1e9 elements). transformers' Adafactor factors the second moments of matrices only, and
        clips by the root mean square of a tensor's update; its factors are whole tensors, to which PyTorch adds no
        shards of FSDP2. bitsandbytes passes the number of elements to its kernel in 32 bits: CUDA refuses a negative
        number; from 2^32 on, the number wraps and most weights are not updated. PyTorch's Adagrad allocates its state
        when it is created. accelerate then replaces the weights by their shards, and the state of the former weights
        stays, of which no checkpoint can be made (accelerate 1.15, ``fsdp2_switch_optimizer_parameters``; torch 2.13,
        ``Optimizer.state_dict``). DeepSpeed creates it again for the shares of all groups of weights together
        (``initialize_optimizer_states``), and its step looks for a group of each; adapters are one group.
        """
        sharding = candidate.get("sharding", DDP)
        if choice == _ADAGRAD and sharding in ZERO_STAGES and not has_adapters(candidate):
            return CrashReason(
                f"DeepSpeed makes {choice} anew with a single group of weights, and sharding={sharding} fails at the"
                " second, that of weights that do not decay"
            )
        if choice == _ADAGRAD and sharding == FSDP2 and _saves_state(setting):
            return CrashReason(
                f"{choice} keeps state of the weights that sharding={FSDP2} replaces by shards, and the first"
                " checkpoint fails: save_only_model: true leaves the optimizer out"
            )
        if choice == _ADAFACTOR and sharding == FSDP2:
            return CrashReason(
                f"transformers' {choice} adds the shards of sharding={FSDP2}, which are DTensors, to whole tensors, and"
                " fails in the first step; adamw_torch and sgd do not"
            )
        if choice == _ADAFACTOR:
            base = setting.base if setting.is_users_choice(self.name, choice) else None
            own = base.choices.get("sharding", DDP) if base is not None else DDP
            if sharding == own or not {sharding, own} & ZERO_STAGES.keys():
                return None
            return (
                f"{choice} trains differently with sharding={sharding} than with sharding={own}: DeepSpeed passes it"
                " one flat tensor, whose second moments are not factored, and whose update is clipped as a whole"
            )
        option = option_of(self, choice)
        if option is None or option.package != _BITSANDBYTES:
            return None
        share = setting.workload.model.parameters // setting.machine.hardware.processes
        if sharding in ("zero1", "zero2") and share >= _COUNT_OVERFLOW and not has_adapters(candidate):
            return CrashReason(
                f"{_BITSANDBYTES} cannot count {share:,} elements: {sharding} flattens a process's share of the weights"
                " into one tensor"
            )
        if sharding != FSDP2:
            return None
        # https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1633; tests/contract/test_bitsandbytes.py
        return CrashReason(
            f"{_BITSANDBYTES} cannot update the parameters that sharding={FSDP2} shards, which are DTensors"
        )


def _saves_state(setting: Setting) -> bool:
    """Return whether checkpoints with the optimizer's state are saved, as by default."""
    return setting.users_entry(f"args.{SAVING}") != NO_CHECKPOINTS and not setting.users_entry("args.save_only_model")
