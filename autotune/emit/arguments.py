"""Converts a chosen candidate to the arguments of ``trl``, for both ``config.yaml`` and ``train.py``."""

from __future__ import annotations

from autotune.core.files.text import uncompressed
from autotune.core.plan import TrainingPlan
from autotune.core.workload import Workload
from autotune.emit.rows import TrainingRows
from autotune.inspection.dataset import builder_of
from autotune.trainers import find_trainer

PEFT_CONFIG = "peft_config.json"
"""The bundle's adapter file, if the adapter is PEFT's own JSON."""

THREADS = "OMP_NUM_THREADS"
"""Environment variable for the CPU threads of a process."""

ACCELERATE_ARGUMENTS = frozenset({"deepspeed", "parallelism_config"})
"""Arguments of a plan that go to accelerate's file instead (:mod:`autotune.emit.launch`)."""


def training_arguments(plan: TrainingPlan, workload: Workload, rows: TrainingRows) -> dict[str, object]:
    """Return the arguments of ``trl TRAINER``: model and data first, then what the plan sets."""
    source, args = workload.model_source, find_trainer(plan.trainer).written_args(plan)
    # The script reads the adapter from a file, not from TRL's arguments.
    model = {name: value for name, value in plan.model.items() if not (plan.peft and name == "use_peft")}
    return {
        "model_name_or_path": source.name,
        **({"model_revision": source.revision} if source.revision != "main" else {}),
        **rows.arguments(),
        # A relative name, so that it stays valid when the bundle is moved.
        "output_dir": f"{short_name(source.name)}-{short_name(workload.dataset.name)}-{workload.trainer}",
        **({"reward_funcs": list(plan.rewards)} if plan.rewards else {}),
        **model,
        **{name: value for name, value in args.items() if name not in ACCELERATE_ARGUMENTS},
    }


def thread_variables(threads: int | None) -> dict[str, str]:
    """Return the variable for the CPU threads of each process, which every launcher passes on.

    Without it, a process has one thread, even for an optimizer on the host (accelerate 1.15, ``commands/launch.py``;
    torch, ``distributed/run.py``). ``num_cpu_threads_per_process`` reaches neither DeepSpeed's processes
    (``prepare_deepspeed_cmd_env``) nor those of ``accelerate launch train.py``.

    Args:
        threads: None if the machine's cores are unknown; the launcher then decides.
    """
    return {THREADS: str(threads)} if threads is not None else {}


def short_name(name: str) -> str:
    """Return the last part of a hub id or a path, without the ending of a data file."""
    path = uncompressed(name)
    return path.name if builder_of(path) is None else path.stem
