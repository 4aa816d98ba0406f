"""``accelerate.yaml`` and ``deepspeed.json``: how ``accelerate launch`` starts the processes of a plan."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from autotune.core.plan import TrainingPlan

ACCELERATE = "accelerate.yaml"
DEEPSPEED = "deepspeed.json"
PARALLELISM = "parallelism_config_"
"""How keys of ``parallelism_config`` begin in accelerate's file."""
FILES = (ACCELERATE, DEEPSPEED)
"""The files of a bundle that say how its processes are started."""


def launches(plan: TrainingPlan) -> bool:
    """Return whether a plan needs a file for ``accelerate launch``: without one, a single process is started."""
    return plan.launch.processes > 1 or bool(plan.args.get("deepspeed"))


def launch_files(plan: TrainingPlan, directory: Path) -> dict[str, str]:
    """Return the texts of the files that a plan needs in the bundle's directory, by their names."""
    import yaml

    if not launches(plan):
        return {}
    document = accelerate_document(plan, directory)
    files = {ACCELERATE: yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=10_000)}
    if plan.args.get("deepspeed"):
        files[DEEPSPEED] = json.dumps(plan.args["deepspeed"], indent=2) + "\n"
    return files


def accelerate_document(plan: TrainingPlan, directory: Path) -> dict[str, object]:
    """Return what ``accelerate launch --config_file`` reads.

    FSDP is in the trainer's own arguments, and DeepSpeed here: on a CPU, transformers otherwise fills in DeepSpeed's
    document before the group exists. MULTI_CPU would start a single process (accelerate 1.15, ``commands/launch.py``).
    """
    deepspeed = plan.args.get("deepspeed")
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED" if deepspeed else "MULTI_GPU" if plan.launch.processes > 1 else "NO",
        **({"parallelism_config": _parallelism_config(plan)} if plan.parallelism else {}),
        **({"deepspeed_config": _deepspeed_config(deepspeed, directory)} if isinstance(deepspeed, Mapping) else {}),
        "num_processes": plan.launch.processes,
        "num_machines": plan.launch.machines,
        "machine_rank": 0,
        "main_training_function": "main",
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
    }


def _parallelism_config(plan: TrainingPlan) -> dict[str, object]:
    """Return the sizes by the words of ``accelerate launch``, which hands them on in the environment."""
    return {f"{PARALLELISM}{name}": value for name, value in plan.parallelism.items()}


def _deepspeed_config(document: Mapping[str, object], directory: Path) -> dict[str, object]:
    zero = document.get("zero_optimization")
    stage = zero.get("stage") if isinstance(zero, Mapping) else None
    # With stage 3, each process then loads its share of the weights only, as a probe does.
    return {"deepspeed_config_file": str(directory.absolute() / DEEPSPEED), "zero3_init_flag": stage == 3}
