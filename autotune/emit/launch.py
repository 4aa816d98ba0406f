"""Writes ``accelerate.yaml`` and ``deepspeed.json``, with which ``accelerate launch`` starts a plan's processes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from autotune.core.files.nested import mapping
from autotune.core.files.yaml_text import yaml_text
from autotune.core.plan import TrainingPlan
from autotune.techniques.sharding import zero_stage

ACCELERATE = "accelerate.yaml"
DEEPSPEED = "deepspeed.json"
PARALLELISM = "parallelism_config_"
"""Prefix of the keys of ``parallelism_config`` in accelerate's file."""

PRECISION = "mixed_precision"
"""The precision key of ``accelerate launch``; the trainer's arguments set the precision."""
FROM_TRAINER_ARGUMENTS = "no"
"""Value that leaves the precision to the trainer's arguments."""
_EMPTY: Mapping[str, object] = {}
_KEYS_SET_BY_AUTOTUNE = frozenset({"distributed_type", "deepspeed_config", "num_processes", "num_machines", "use_cpu"})
# Keys that the trainer's arguments, such as `torch_compile`, or DeepSpeed's document replace.
_ENGINE_KEYS = frozenset({"deepspeed_config", "fsdp_config", "parallelism_config", "dynamo_config"})
# The trainer's arguments set the precision. For float32, transformers takes accelerate's (`TrainingArguments`), and
# with DeepSpeed's own document accelerate refuses it (accelerate/utils/dataclasses.py, `_deepspeed_config_checks`).
_PRECISION_KEYS = frozenset({PRECISION, "fp16"})
_GPU_IDS = "gpu_ids"
# Keys of accelerate's file that DeepSpeed's own document does not have.
_LAUNCHER_KEYS = frozenset({
    "deepspeed_hostfile", "deepspeed_multinode_launcher", "deepspeed_exclusion_filter", "deepspeed_inclusion_filter",
    "deepspeed_moe_layer_cls_names",
})  # fmt: skip


def launch_keys(plan: TrainingPlan, directory: Path) -> dict[str, object]:
    """Return the keys of a ``trl`` configuration that make ``accelerate launch`` start a plan's processes.

    Args:
        directory: directory of the files of :func:`launch_files`.
    """
    if plan.args.get("deepspeed") or plan.parallelism or plan.launch.machines > 1:
        return {"accelerate_config": str(directory.absolute() / ACCELERATE)}
    # TRL's own files (`trl/accelerate_configs`), whose precision is bf16: their names are valid on every machine and
    # in every directory. Without a named file, `accelerate launch` takes engine, precision and GPUs from the file that
    # `accelerate config` wrote to the user's home (accelerate 1.15, `_validate_launch_command`).
    name = "multi_gpu" if plan.launch.processes > 1 else "single_gpu"
    return {"accelerate_config": name, PRECISION: FROM_TRAINER_ARGUMENTS}


def launch_files(plan: TrainingPlan, directory: Path, user_document: Mapping[str, object] = _EMPTY) -> dict[str, str]:
    """Return the texts of the launch files of a plan, by name.

    Args:
        user_document: the user's document for ``accelerate launch``; empty without one.
    """
    # Without a file, `accelerate launch` starts a single process.
    if not plan.in_group and not user_document:
        return {}
    document = accelerate_document(plan, directory, user_document)
    files = {ACCELERATE: yaml_text(document)}
    if plan.args.get("deepspeed"):
        files[DEEPSPEED] = json.dumps(plan.args["deepspeed"], indent=2) + "\n"
    return files


def accelerate_document(
    plan: TrainingPlan, directory: Path, user_document: Mapping[str, object] = _EMPTY
) -> dict[str, object]:
    """Return the document for ``accelerate launch --config_file``; the user's own keys stay unless an engine sets them.

    FSDP is in the trainer's own arguments, and DeepSpeed here: on a CPU, transformers otherwise fills in DeepSpeed's
    document before the group exists. MULTI_CPU would start a single process (accelerate 1.15, ``commands/launch.py``).
    """
    deepspeed = plan.args.get("deepspeed")
    engine = {"deepspeed_config": _deepspeed_config(plan, directory, user_document)} if deepspeed else {}
    # Spelled like the options of `accelerate launch`, which passes them on in the environment.
    sizes = {f"{PARALLELISM}{name}": value for name, value in plan.parallelism.items()}
    defaults = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED" if deepspeed else "MULTI_GPU" if plan.launch.processes > 1 else "NO",
        **({"parallelism_config": sizes} if plan.parallelism else {}),
        **engine,
        "num_processes": plan.launch.processes,
        "num_machines": plan.launch.machines,
        "machine_rank": 0,
        "main_training_function": "main",
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
    }
    required = {name: value for name, value in defaults.items() if name in _KEYS_SET_BY_AUTOTUNE}
    dropped = _ENGINE_KEYS | _PRECISION_KEYS
    # The user's `gpu_ids` are for another number of processes: too few GPUs, or several for one process.
    listed_gpus = str(user_document.get(_GPU_IDS)).count(",") + 1
    dropped = dropped | {_GPU_IDS} if listed_gpus != plan.launch.per_machine else dropped
    user_keys = {name: value for name, value in user_document.items() if name not in dropped}
    return {**defaults, **user_keys, **required}


def _deepspeed_config(plan: TrainingPlan, directory: Path, user_document: Mapping[str, object]) -> dict[str, object]:
    user_config = mapping(user_document.get("deepspeed_config"))
    user_keys = {name: value for name, value in user_config.items() if name in _LAUNCHER_KEYS}
    file = str(directory.absolute() / DEEPSPEED)
    # The default launcher is pdsh, which without a hostfile trains on each machine separately (accelerate 1.15,
    # `prepare_deepspeed_cmd_env`; deepspeed 0.19, `launcher/runner.py`).
    launcher = {"deepspeed_multinode_launcher": "standard"} if plan.launch.machines > 1 else {}
    # With stage 3, each process then loads only its shard of the weights, as in a probe.
    return {**launcher, **user_keys, "deepspeed_config_file": file, "zero3_init_flag": zero_stage(plan) == 3}
