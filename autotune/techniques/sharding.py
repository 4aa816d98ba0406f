"""``sharding``: which state is sharded among the processes of a training, and by which engine."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.core.candidate import Candidate, Choice
from autotune.core.files.nested import mapping
from autotune.core.machine import Machine
from autotune.core.plan import TrainingPlan
from autotune.core.setting import Setting
from autotune.techniques.base import OFF, ON, CrashReason, Option, Technique, TrainerFacts, UnsearchedReason, differing
from autotune.techniques.lora import has_adapters
from autotune.techniques.reference import PRECOMPUTED, SYNCHRONISED, SYNCHRONISED_WHOLE
from autotune.techniques.trace_impact import PlanImpact, TraceImpact
from autotune.techniques.versions import installed
from autotune.units import MIB

ENGINE_FIELDS = ("deepspeed", "fsdp", "fsdp_config", "parallelism_config")
"""Fields of ``transformers.TrainingArguments`` that select the engine that shards a training, and how."""
TIMING = ("flops_profiler", "wall_clock_breakdown")
"""Keys of DeepSpeed's document by which it times the parts of a step, and waits for the GPU after each."""
REPORTING = frozenset({
    *TIMING, "comet", "comms_logger", "csv_monitor", "dump_state", "memory_breakdown", "tensorboard", "wandb",
})  # fmt: skip
"""All keys by which it reports on a training (deepspeed 0.19, ``monitor``, ``runtime/engine.py``), as ``report_to`` of
the trainer does; probes and traces leave them out."""
DDP = "ddp"
FSDP2 = "fsdp2"
ZERO_STAGES: Mapping[Choice, int] = {"zero1": 1, "zero2": 2, "zero3": 3}
"""DeepSpeed's stages by choice."""
WEIGHTS_SHARED = frozenset({"zero3", FSDP2})
"""The choices in which no process holds all weights."""
NO_OTHER_MEMORY = "there is one process, and a CPU has no other memory to offload to"
# DeepSpeed gathers the embedding, which is larger than its bucket, more than one layer before the backward pass ends.
_EDGES = 2
# DDP's constructor joins weights in buckets of 250 MiB, and sends two at a time (`broadcast_bucket_size` of
# torch/nn/parallel/distributed.py, `broadcast_coalesced` of torch/csrc/distributed/c10d/comm.cpp).
_BROADCAST_BYTES = 2 * 250 * MIB
# With two processes, times of a 1.5B shape with adapters were 15 % too long from 2 and 3 of 28 layers; with four and
# eight, 6 and 3 % too short, and the depths would be 4 and 8 layers apart.
_FEW_SHARES = 3
LIVE_PARAMETERS = 1_000_000_000
"""DeepSpeed's default of ``stage3_max_live_parameters``."""
_AUTO = "auto"
# `auto` takes the value of the trainer's own argument, and bucket sizes by the model's width
# (transformers/integrations/deepspeed.py); DeepSpeed's default buckets hold 5e8 elements, too many for a small model.
_DOCUMENT: Mapping[str, object] = {
    "args.deepspeed.train_batch_size": _AUTO,
    "args.deepspeed.train_micro_batch_size_per_gpu": _AUTO,
    "args.deepspeed.gradient_accumulation_steps": _AUTO,
    "args.deepspeed.gradient_clipping": _AUTO,
    "args.deepspeed.bf16.enabled": _AUTO,
    "args.deepspeed.fp16.enabled": _AUTO,
    "args.deepspeed.zero_optimization.reduce_bucket_size": _AUTO,
    # Without it, DeepSpeed refuses optimizers that are not on its list, and offloading of any but its own.
    "args.deepspeed.zero_allow_untested_optimizer": True,
    "args.deepspeed.zero_force_ds_cpu_optimizer": False,
}
_DOCUMENT_3: Mapping[str, object] = {
    "args.deepspeed.zero_optimization.stage3_prefetch_bucket_size": _AUTO,
    "args.deepspeed.zero_optimization.stage3_param_persistence_threshold": _AUTO,
    "args.deepspeed.zero_optimization.stage3_gather_16bit_weights_on_model_save": True,
}
# DeepSpeed prefetches weights in the order of their use in generation, including the output head's. In training, TRL's
# fused head gathers this weight itself, and DeepSpeed then fails to partition it: "Cannot partition a param in flight"
# (TRL 1.16, `maybe_gather_lm_head_ctx`; deepspeed 0.19).
_NO_PREFETCH: Mapping[str, object] = {"args.deepspeed.zero_optimization.stage3_prefetch_bucket_size": 0}
# Under FSDP, accelerate's `prepare_model` moves no model, and does not wrap models for evaluation (accelerate 1.15).
_ON_THE_HOST = "DistillationTrainer leaves the teacher on the host under FSDP, and its first pass fails"
_STORAGE = "bnb_4bit_quant_storage"
FULL_EVALUATION = ("bf16_full_eval", "fp16_full_eval")
"""Fields of ``transformers.TrainingArguments`` with which a model is moved to the GPU only when training begins."""
_EXCLUDES_INTEGERS = ">=1.14"
"""Versions of accelerate that exclude packed integers from FSDP2, which fails on them
(https://github.com/huggingface/accelerate/pull/3987)."""
_SHARDS = "args.parallelism_config.dp_shard_size"
_ZERO = "args.deepspeed.zero_optimization"
_STAGE = f"{_ZERO}.stage"
_FSDP2: Mapping[str, object] = {
    "args.fsdp": True,
    "args.fsdp_config.version": 2,
    "args.fsdp_config.auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
}


def zero_of(plan: TrainingPlan) -> Mapping[str, object]:
    """Return the ZeRO section of a plan's DeepSpeed document; empty if there is none."""
    return mapping(plan.entry(_ZERO))


def zero_stage(plan: TrainingPlan) -> int:
    """Return the stage of DeepSpeed's ZeRO, 0 without DeepSpeed or ZeRO."""
    stage = zero_of(plan).get("stage")
    return stage if isinstance(stage, int) else 0


def offloads(zero: Mapping[str, object]) -> bool:
    """Return whether the optimizer is on the host; for DeepSpeed, a missing device and ``none`` mean the GPU."""
    return (mapping(zero.get("offload_optimizer")).get("device") or "none") != "none"


def _impact_in(plan: TrainingPlan) -> PlanImpact:
    """Return the engine's effect on the extrapolation over layers.

    ZeRO-2 on the device keeps every tensor whole that overlaps with a process's share, so that its gradient buffer
    grows in jumps with the depth. ZeRO-1 and ZeRO-2 with offload first copy the part of each gradient in the process's
    share in float32 (``async_inplace_copy_grad_to_fp32_buffer_from_gpu`` of ``stage_1_and_2.py``): the last process
    holds the whole output head of a large model, but only a part of it with few layers. With ZeRO-3, each process has
    an equal part of every tensor. At each module, ZeRO-3 fetches at least one further weight
    (``partitioned_param_coordinator.py``): adapters are many small modules, so it runs ahead up to its limit.

    The host bounds an update of adapters, so that its time follows from the number of tensors in a process's share.
    With two processes, half of three layers need not have one and a half times as many as half of two.
    """
    zero, stage, several = zero_of(plan), zero_stage(plan), plan.launch.processes > 1
    on_host, in_3 = offloads(zero), stage == ZERO_STAGES["zero3"]
    live = zero.get("stage3_max_live_parameters", LIVE_PARAMETERS)
    adapts = bool(plan.peft or plan.model.get("use_peft"))
    runs_ahead, in_shares = in_3 and adapts, adapts and stage in (ZERO_STAGES["zero1"], ZERO_STAGES["zero2"])
    is_replicated = several and not (plan.args.get("deepspeed") or plan.args.get("fsdp"))
    return PlanImpact(
        layer_period=plan.launch.processes if in_shares and plan.launch.processes <= _FEW_SHARES else 1,
        uneven=several and stage == ZERO_STAGES["zero2"] and not on_host,
        needs_all_layers=several and stage in (ZERO_STAGES["zero1"], ZERO_STAGES["zero2"]) and on_host,
        edges=_EDGES if in_3 or plan.args.get("fsdp") else 0,
        gathers_ahead=int(live) if runs_ahead and isinstance(live, int | float) else 0,
        broadcast_bytes=_BROADCAST_BYTES if is_replicated else 0,
    )


class Sharding(Technique):
    """Data parallelism of PyTorch (DDP, FSDP2) or DeepSpeed (ZeRO), through ``fsdp`` or ``deepspeed``."""

    summary = "Shards optimizer state, gradients and weights across processes."
    options = (
        Option(DDP, "each process holds everything"),
        Option("zero1", "DeepSpeed shards the optimizer state", package="deepspeed"),
        Option("zero2", "and the gradients", package="deepspeed"),
        Option("zero3", "and the weights, which are gathered for each use", package="deepspeed"),
        Option(FSDP2, "PyTorch shards weights, gradients and optimizer state, layer by layer"),
    )
    needs = (
        "several processes (--num-processes), or one on a GPU that offloads as a last resort; for zero1 to zero3 the "
        "package deepspeed"
    )
    writes = frozenset({_STAGE, *_DOCUMENT, *_DOCUMENT_3, *_FSDP2, _SHARDS})
    identified_by = frozenset({_STAGE, "args.fsdp", "args.fsdp_config.version"})
    by_trainer = differing(distillation=TrainerFacts(refused={FSDP2: _ON_THE_HOST}))
    impact = TraceImpact(frees_weights=WEIGHTS_SHARED.__contains__, in_plan=_impact_in)

    def matters(self, setting: Setting) -> bool:
        """Return whether there are several processes; a single one offloads only as a last resort, or if fixed."""
        return setting.machine.hardware.processes > 1 or setting.last_resorts

    def unavailable(self, choice: Choice, machine: Machine) -> str | None:
        """Return a reason if DeepSpeed is missing or too old, or a single process has no device to offload from."""
        lacking = super().unavailable(choice, machine)
        if lacking or choice == DDP or machine.hardware.processes > 1:
            return lacking
        if choice not in ("zero2", "zero3"):
            return "there is one process, so nothing is sharded (--num-processes)"
        return NO_OTHER_MEMORY if machine.hardware.kind == "cpu" else None

    def conflict(self, choice: Choice, candidate: Candidate, setting: Setting) -> str | None:
        """Return a reason for a single process without offload, sharded quantised weights, or a reference.

        With adapters, TRL precomputes the reference with the trained model, which FSDP has not yet moved to the GPU
        (trl 1.16, ``_precompute_ref_logps``; without adapters, it uses a copy,
        https://github.com/huggingface/trl/issues/6470). With DDP, it is the model itself, which ``Trainer`` moves there
        when it is built, except with ``bf16_full_eval`` (transformers 5.23, ``place_model_on_device``).
        """
        alone = setting.machine.hardware.processes == 1
        if choice != DDP and alone and candidate.get("offload", "none") == "none":
            return f"sharding={choice} of one process does nothing without offload"
        quantised = candidate.get("quantization", "none")
        # accelerate excludes weights packed in integers (accelerate 1.15, ``fsdp2_prepare_model``), bitsandbytes'
        # default.
        floats = "float" in str(setting.users_entry(f"model.{_STORAGE}"))
        if choice == FSDP2 and quantised == "8bit":
            # They are attributes of the parameters that ``fully_shard`` replaces (bitsandbytes 0.50, ``Int8Params``).
            return CrashReason(
                f"8-bit weights lose their scales where {FSDP2} shards them, and the first step fails; 4-bit weights do"
                " not"
            )
        if choice == FSDP2 and quantised != "none" and not floats:
            if not installed(setting.machine, "accelerate", _EXCLUDES_INTEGERS):
                return CrashReason(f"{FSDP2} of packed integers needs accelerate{_EXCLUDES_INTEGERS}")
            return (
                f"accelerate does not shard packed integers, so each process holds the {quantised} weights whole,"
                f" unless {_STORAGE} is a floating type"
            )
        precomputed = candidate.get("reference") == PRECOMPUTED and setting.machine.hardware.kind == "cuda"
        if choice == FSDP2 and precomputed and has_adapters(candidate):
            return CrashReason(f"reference={PRECOMPUTED} runs a model with adapters before {FSDP2} puts it on the GPU")
        late = [name for name in FULL_EVALUATION if setting.users_entry(f"args.{name}")]
        # bitsandbytes loads quantised weights onto the GPU, and TRL those of a single process (`device_map`).
        if choice == DDP and precomputed and late and not alone and quantised == "none":
            return CrashReason(
                f"reference={PRECOMPUTED} runs the model before training, and {late[0]} keeps it on the host until then"
            )
        if choice in WEIGHTS_SHARED and quantised != "none":
            # transformers 5.23 loads them onto each GPU (``update_device_map`` of bitsandbytes' quantizers), and
            # accelerate 1.15 keeps them until all are sharded (``original_sd`` of ``fsdp2_prepare_model``).
            return UnsearchedReason(f"sharding={choice} of quantised weights is not searched: each GPU first loads all")
        return SYNCHRONISED_WHOLE if choice == "zero3" and setting.users_entry(SYNCHRONISED) else None

    def plan(self, choice: Choice, candidate: Candidate, setting: Setting) -> Mapping[str, object]:
        """See :class:`Technique`."""
        if choice == FSDP2:
            shared, groups = int(candidate.get("context_parallel", 1)), int(candidate.get("dp_replicate_size", 1))
            if shared == groups == 1:
                return _FSDP2
            # accelerate needs all sizes if one is given.
            return {**_FSDP2, _SHARDS: max(1, setting.machine.hardware.processes // (shared * groups))}
        if choice in ZERO_STAGES:
            ahead = _NO_PREFETCH if candidate.get("ds3_gather_for_generation", ON) == OFF else {}
            further = {**_DOCUMENT_3, **ahead} if choice == "zero3" else {}
            return {_STAGE: ZERO_STAGES[choice], **_DOCUMENT, **further}
        return {}
