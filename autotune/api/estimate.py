"""The use case behind ``autotune.estimate``: the memory of one configuration that the user has already."""

from __future__ import annotations

import json
from enum import Enum
from typing import TYPE_CHECKING, Any

from autotune.api.options import checked_options
from autotune.api.planned import planned_machine, planned_workload
from autotune.api.tracing import ServerTracer
from autotune.core.estimate import MemoryEstimate
from autotune.core.events import Listener, ignore
from autotune.core.plan import TrainingPlan
from autotune.core.setting import Setting
from autotune.errors import AutotuneError, InputError
from autotune.inspection.machine import environment
from autotune.inspection.model import model_source
from autotune.planning.cache import Cache, cache_directory
from autotune.planning.fit import Fit
from autotune.planning.groups import trace_request
from autotune.planning.memory import TRACED_ERROR, memory_estimate
from autotune.planning.planner import depths_of
from autotune.planning.shape import Basis, Kind, Shape
from autotune.planning.sources import source_digest
from autotune.planning.traces import Traces, Untraceable
from autotune.trainers import TRAINERS

if TYPE_CHECKING:
    import peft
    import trl

# What of a trainer's arguments memory and time of a step depend on, sizes apart.
_ARGUMENTS = (
    "activation_offloading",
    "bf16",
    "chunked_lm_head",
    "fp16",
    "gradient_checkpointing",
    "gradient_checkpointing_kwargs",
    "liger_kernel_config",
    "loss_type",
    "max_grad_norm",
    "optim",
    "optim_args",
    "tf32",
    "use_liger_kernel",
)
_WIDEST = 1 << 24


def estimate(
    model: str,
    config: trl.SFTConfig,
    peft_config: peft.PeftConfig | None = None,
    *,
    shape: tuple[int, int],
    gpu: str,
    listener: Listener = ignore,
) -> MemoryEstimate:
    """Predict memory and time of training with a configuration, by tracing its step; no GPU is needed.

    Args:
        model: hub id, local directory, or ``config.json``; no weights are needed.
        config: as it would be given to ``trl.SFTTrainer``.
        peft_config: as it would be given to it; LoRA alone is understood.
        shape: rows of the largest micro-batch, and tokens of each. With packing or padding-free, they lie end to end.
        gpu: name of a GPU, such as ``H100-80GB``, a size such as ``24GiB``, or ``cpu`` for the CPU's allocator.
        listener: is told what happens.

    Raises:
        InputError: something that was given cannot be used.
        AutotuneError: the step cannot be traced; the message says which operator. A probe can tell, then.
    """
    rows, tokens = shape
    if rows < 1 or tokens < 1 or rows * tokens > _WIDEST:
        raise InputError(
            f"A micro-batch of {rows} rows of {tokens} tokens is not possible.", hint="Both are at least 1."
        )
    plan = training_plan(config, peft_config)
    source, planned = model_source(model, "random"), planned_machine(gpu)
    options = checked_options(
        trainer=plan.trainer, device="auto", margin=0.0, global_batch_size=None, max_length=None, token_coverage=None,
        allow=(), fix={}, exclude=("attention",), space=None, effort="normal", trials=None, timeout=None, seed=0,
    )  # fmt: skip
    cache = Cache(cache_directory())
    flat = bool(plan.args["packing"]) or bool(plan.args["padding_free"])
    kind = Kind.FLAT if flat else Kind.EQUAL
    traced = Shape(1, rows * tokens) if flat else Shape(rows, tokens)
    with ServerTracer(planned.cores, listener) as tracer:
        workload = planned_workload(options, source, None, tracer, cache, listener)
        setting = Setting(workload, planned.machine, rows, 1.0)
        versions = {**environment(planned.machine), "autotune": source_digest()}
        traces = Traces(tracer, cache, workload.model.fingerprint, versions)
        points = [(layers, traced) for layers in depths_of(plan, workload.model.layer_kinds)]
        requests = [trace_request(plan, kind, traced, layers, setting, planned.gpu) for layers, _ in points]
        replies = dict(zip(points, traces.get(requests), strict=True))
    found = {point: reply for point, reply in replies.items() if not isinstance(reply, Untraceable)}
    failed = next((reply for reply in replies.values() if isinstance(reply, Untraceable)), None)
    if failed is not None:
        raise AutotuneError(f"{model} cannot be traced: {failed.reason}", hint="`autotune probe` can measure it.")
    micro_batches = int(str(plan.args["gradient_accumulation_steps"]))
    forecast = Fit(Basis.CONSTANT, found).forecast(len(workload.model.layer_kinds), traced, micro_batches)
    return memory_estimate(forecast, forecast, micro_batches, planned.gpu, TRACED_ERROR)


def training_plan(config: object, peft_config: object | None) -> TrainingPlan:
    """Return the training plan that a configuration object of TRL's comes to.

    Raises:
        InputError: it is another trainer's, or of a kind of PEFT that is not understood.
    """
    names = [kind.__name__ for kind in type(config).__mro__]
    if "SFTConfig" not in names:
        known = ", ".join(f"{name.upper()}Config" for name in TRAINERS)
        raise InputError(f"A {names[0]} is no configuration that autotune knows.", hint=f"It knows {known}.")
    args: dict[str, object] = {
        name: value
        for name in _ARGUMENTS
        if hasattr(config, name) and (value := _plain(getattr(config, name))) is not None
    }
    for name in ("packing", "padding_free", "per_device_train_batch_size", "gradient_accumulation_steps"):
        args[name] = getattr(config, name)
    return TrainingPlan("sft", args, {**_model_words(config), **_peft_words(peft_config)})


def _model_words(config: Any) -> dict[str, object]:
    kwargs = config.model_init_kwargs or {}
    dtype = str(kwargs.get("dtype", "float32")).removeprefix("torch.")
    words: dict[str, object] = {"dtype": dtype, "use_peft": False}
    if kwargs.get("attn_implementation"):
        words["attn_implementation"] = kwargs["attn_implementation"]
    quantization = kwargs.get("quantization_config")
    if quantization is not None:
        words["load_in_4bit"] = bool(getattr(quantization, "load_in_4bit", False))
        words["load_in_8bit"] = bool(getattr(quantization, "load_in_8bit", False))
    return words


def _peft_words(peft_config: Any) -> dict[str, object]:
    if peft_config is None:
        return {}
    if type(peft_config).__name__ != "LoraConfig":
        raise InputError(f"A {type(peft_config).__name__} is not understood.", hint="peft.LoraConfig is.")
    targets = peft_config.target_modules
    return {
        "use_peft": True,
        "lora_r": peft_config.r,
        "lora_alpha": peft_config.lora_alpha,
        "lora_dropout": peft_config.lora_dropout,
        "lora_target_modules": sorted(targets) if isinstance(targets, (set, list, tuple)) else targets,
        "use_rslora": peft_config.use_rslora,
        "use_dora": peft_config.use_dora,
    }


def _plain(value: object) -> object:
    """Return a value as JSON has it, or None where it has none."""
    plain = value.value if isinstance(value, Enum) else value
    try:
        json.dumps(plain)
    except TypeError:
        return None
    return plain
