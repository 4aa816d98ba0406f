"""``context_parallel``: the number of processes that split the tokens of a row."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.core.candidate import Candidate, Choice
from autotune.core.gpu import AMPERE
from autotune.core.setting import Setting
from autotune.techniques.base import OFF, ON, CrashReason, Equipped, Option, TrainerFacts, differing
from autotune.techniques.packing import EVALUATION_PACKED, NONE
from autotune.techniques.sharding import DDP, FSDP2
from autotune.techniques.trace_impact import TraceImpact

NAME = "context_parallel"
_SDPA = "sdpa"
_LONG_ROW = 8192
"""Tokens of the longest row from which on rows are split by default. With checkpointing, the kept activations of such a
row take 2 GiB in an 8B model (32 layers of 4,096 x 8,192 numbers in bf16), so shorter rows need not be split."""
_NO_KERNEL = "PyTorch's kernel of attention for CPUs cannot be split (no sharding strategy in torch.distributed.tensor)"
_PAIRS = "TRL splits the tokens but not the loss mask, so their lengths differ"
_UNSPLIT = "TRL does not split the tokens that it passes to the model"
_IMAGES_UNSPLIT = "transformers splits the tokens of a row but not its images, so their numbers differ"
_GENERATED = "TRL builds the inputs after generation, from whole prompts"
_SCORED = "TRL reads a row's score at its last token, which only one of the processes has"
_REASONS: Mapping[str, str] = {
    "dpo": _PAIRS, "kto": _UNSPLIT, "grpo": _GENERATED, "rloo": _GENERATED,
    "distillation": _GENERATED,
    "online_dpo": "completions are generated from whole rows in each step",
}  # fmt: skip
_SIZES = (2, 4, 8)
_EXACT = "float32"
_PAD = "pad_to_multiple_of has to be a multiple of that"


def ranks_per_row(candidate: Candidate) -> int:
    """Return how many processes share each row of a candidate."""
    return int(candidate.get(NAME, 1))


def data_ranks(candidate: Candidate, setting: Setting) -> int:
    """Return how many processes train on rows of their own; see :attr:`autotune.core.plan.TrainingPlan.data_ranks`."""
    return max(1, setting.machine.hardware.processes // ranks_per_row(candidate))


class ContextParallel(Equipped):
    """``cp_size`` of accelerate's ``ParallelismConfig``: ring attention over FSDP2's ranks."""

    summary = "Splits each row across this number of processes (ring attention)."
    options = (
        Option(1, "each process has whole rows", entries={}),
        *(Option(size, f"{size} processes per row") for size in _SIZES),
    )
    without_gpu = _NO_KERNEL
    with_images = _IMAGES_UNSPLIT
    needs = (
        f"a GPU, sharding={FSDP2}, attention={_SDPA}, unpacked rows padded to a multiple of twice that number, and "
        "half precision with grouped-query attention"
    )
    writes = frozenset({"args.parallelism_config.cp_size"})
    impact = TraceImpact(also_sets_sizes=True)
    by_trainer = differing(
        **{trainer: TrainerFacts(refused=dict.fromkeys(_SIZES, reason)) for trainer, reason in _REASONS.items()},
        reward=TrainerFacts(ignored=dict.fromkeys(_SIZES, _SCORED)),
    )

    def matters(self, setting: Setting) -> bool:
        """Return whether there are several processes and long rows; otherwise only a fixed choice is used."""
        return setting.machine.hardware.processes > 1 and setting.workload.longest >= _LONG_ROW

    def unsuitable(self, choice: Choice, setting: Setting) -> str | None:
        """Return a reason for rows with images, and if the processes cannot be divided into groups of that size."""
        processes, pictured = setting.machine.hardware.processes, super().unsuitable(choice, setting)
        if pictured is None and processes % int(choice):
            return f"{processes} processes cannot be divided into groups of {choice} (--num-processes)"
        return pictured

    def normal(self, choice: Choice, candidate: Candidate, setting: Setting) -> Choice:
        """Return 1 if rows cannot be split, unless the user fixed it: then the conflict is reported."""
        is_fixed = setting.ranks_per_row != 1
        return choice if is_fixed or self.conflict(choice, candidate, setting) is None else 1

    def conflict(self, choice: Choice, candidate: Candidate, setting: Setting) -> str | None:
        """Return a reason if the engine cannot split rows, or would train something else."""
        if choice == 1:
            return None
        if setting.workload.has_images:
            return CrashReason(_IMAGES_UNSPLIT)
        text, multiple = f"{NAME}={choice}", 2 * int(choice)
        if candidate.get("sharding", DDP) != FSDP2:
            return f"{text} needs sharding={FSDP2}: accelerate splits rows only with it"
        if candidate.get("attention") != _SDPA:
            return f"{text} needs attention={_SDPA}: PyTorch can split only its kernels"
        if candidate.get("packing", NONE) != NONE:
            return f"{text} drops the mask that keeps packed documents apart (packing={candidate['packing']})"
        if setting.users_entry(EVALUATION_PACKED):
            return f"{text} drops the mask that keeps packed documents apart, and TRL refuses eval_packing with it"
        if candidate.get("padding_free", OFF) == ON:
            return f"{text} drops the mask that keeps documents apart (padding_free=on)"
        padded = candidate.get("pad_to_multiple_of", NONE)
        if padded == NONE or int(padded) % multiple:
            # PyTorch then does not reorder the row for load balancing, but attention assumes that it did (torch 2.13,
            # torch/distributed/tensor/experimental/_context_parallel, _create_default_load_balancer).
            return f"{text} attends to the wrong tokens of rows whose length is not a multiple of {multiple}: {_PAD}"
        return _without_kernel(text, candidate, setting)


def _without_kernel(text: str, candidate: Candidate, setting: Setting) -> str | None:
    """Return a reason if attention has no fused kernel on the GPU that PyTorch can split.

    Flash attention needs Ampere and half precision, and memory-efficient attention as many heads of keys as of queries
    (PyTorch's cuda/sdp_utils.cpp); the fallback consists of operators that DTensor cannot split.
    """
    if not setting.workload.model.grouped_heads:
        return None
    capability = setting.machine.hardware.compute_capability
    why = f"precision={_EXACT}" if candidate.get("precision") == _EXACT else ""
    if not why and capability is not None and capability < AMPERE:
        why = f"compute capability {capability[0]}.{capability[1]}"
    if not why:
        return None
    return f"{text} needs an attention kernel that PyTorch can split, and grouped-query attention has none with {why}"
