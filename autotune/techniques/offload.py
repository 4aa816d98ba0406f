"""``offload``: the part of the sharded state that is kept in the host's memory."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.core.candidate import Candidate, Choice
from autotune.core.files.nested import mapping
from autotune.core.machine import Machine
from autotune.core.plan import TrainingPlan
from autotune.core.setting import Setting
from autotune.techniques.base import Option, Technique
from autotune.techniques.sharding import DDP, FSDP2, NO_OTHER_MEMORY, ZERO_STAGES, offloads, zero_of
from autotune.techniques.trace_impact import PlanImpact, TraceImpact
from autotune.techniques.versions import missing

NONE, OPTIMIZER, PARAMETERS, BOTH = "none", "optimizer", "parameters", "both"
_OPTIMIZER_DEVICE = "args.deepspeed.zero_optimization.offload_optimizer.device"
_PARAMETERS_DEVICE = "args.deepspeed.zero_optimization.offload_param.device"
_FSDP_OFFLOAD = "args.fsdp_config.cpu_offload"
_SUPPORTED: Mapping[Choice, frozenset[Choice]] = {
    "zero1": frozenset({OPTIMIZER}),
    "zero2": frozenset({OPTIMIZER}),
    "zero3": frozenset({OPTIMIZER, PARAMETERS, BOTH}),
    FSDP2: frozenset({BOTH}),
}
"""Choices of this knob by choice of sharding: DeepSpeed's ``offload_param`` needs stage 3 (deepspeed/runtime/zero), and
FSDP2's ``CPUOffloadPolicy`` moves weights, gradients and state together (torch/distributed/fsdp/_fully_shard)."""
# With these variables, accelerate starts gloo in addition to NCCL (accelerate/state.py, `PartialState.__init__`);
# `accelerate launch` sets them if its own file has FSDP.
_WITH_GLOO: Mapping[str, str] = {"env.ACCELERATE_USE_FSDP": "true", "env.FSDP_OFFLOAD_PARAMS": "true"}
# Optimizers of bitsandbytes are CUDA kernels.
_GPU_OPTIMIZERS = ("bnb", "8bit", "paged")


class Offload(Technique):
    """``offload_optimizer`` and ``offload_param`` of DeepSpeed, ``cpu_offload`` of FSDP2. Offloading is exact."""

    summary = "Keeps optimizer state or weights in host memory; the CPU then runs the optimizer."
    options = (
        Option(NONE, "all on the device"),
        Option(OPTIMIZER, "optimizer state, with zero1 to zero3"),
        Option(PARAMETERS, "weights, with zero3"),
        Option(BOTH, "both, with zero3 or fsdp2"),
    )
    needs = "sharding by zero1, zero2, zero3 or fsdp2; with one process zero2 or zero3, a GPU and the package deepspeed"
    writes = frozenset({_OPTIMIZER_DEVICE, _PARAMETERS_DEVICE, _FSDP_OFFLOAD, *_WITH_GLOO})
    impact = TraceImpact(
        frees_weights=lambda choice: choice in (PARAMETERS, BOTH),
        in_plan=lambda plan: PlanImpact(untimed=optimizer_on_host(plan)),
        unplanned="the optimizer's time on the host: no predicted speed on a GPU with optimizer or both",
    )

    def matters(self, setting: Setting) -> bool:
        """Return whether there are several processes; a single one offloads only as a last resort, or if fixed."""
        return setting.machine.hardware.processes > 1 or setting.last_resorts

    def unavailable(self, choice: Choice, machine: Machine) -> str | None:
        """Return a reason if there is one process, and it has no DeepSpeed or no GPU to offload from."""
        if choice == NONE or machine.hardware.processes > 1:
            return None
        if lacking := missing("deepspeed", machine):
            return lacking
        return NO_OTHER_MEMORY if machine.hardware.kind == "cpu" else None

    def conflict(self, choice: Choice, candidate: Candidate, setting: Setting) -> str | None:
        """Return a reason if the engine cannot offload that state, or the optimizer cannot run on the host."""
        if choice == NONE:
            return None
        sharding = candidate.get("sharding", DDP)
        if choice not in _SUPPORTED.get(sharding, frozenset()):
            return f"sharding={sharding} has no offload={choice}"
        if sharding == FSDP2 and setting.machine.hardware.kind == "cpu":
            return "FSDP2 offloads from an accelerator, and there is no accelerator"
        optimizer = str(candidate.get("optimizer", ""))
        if choice != PARAMETERS and any(part in optimizer for part in _GPU_OPTIMIZERS):
            return f"optimizer={optimizer} runs on a GPU only, and offload={choice} runs it on the host"
        return None

    def plan(self, choice: Choice, candidate: Candidate, setting: Setting) -> Mapping[str, object]:
        """See :class:`Technique`."""
        if choice == NONE:
            return {}
        sharding = candidate.get("sharding", DDP)
        if sharding == FSDP2:
            return {_FSDP_OFFLOAD: True, **_WITH_GLOO}
        if sharding not in ZERO_STAGES:
            return {}
        wanted = {_OPTIMIZER_DEVICE: (OPTIMIZER, BOTH), _PARAMETERS_DEVICE: (PARAMETERS, BOTH)}
        return {path: "cpu" for path, choices in wanted.items() if choice in choices}


def offload_variables(args: Mapping[str, object]) -> Mapping[str, str]:
    """Return the environment variables that a training with these arguments needs; empty unless FSDP offloads.

    The norm of gradients on the host is summed over processes, which NCCL cannot and gloo can.
    """
    offloads = args.get("fsdp") and mapping(args.get("fsdp_config")).get("cpu_offload")
    return {path.removeprefix("env."): value for path, value in _WITH_GLOO.items()} if offloads else {}


def optimizer_on_host(plan: TrainingPlan) -> bool:
    """Return whether the optimizer runs on the host, whose speed is unknown."""
    return offloads(zero_of(plan)) or bool(plan.entry(_FSDP_OFFLOAD))
