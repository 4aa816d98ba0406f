"""Converts a chosen candidate to the arguments of ``trl``, for both ``config.yaml`` and ``train.py``."""

from __future__ import annotations

from autotune.core.plan import TrainingPlan
from autotune.core.text import uncompressed
from autotune.core.workload import Workload
from autotune.emit.rows import TrainingRows
from autotune.trainers import find_trainer

PEFT_CONFIG = "peft_config.json"
"""The file of the bundle with the adapter, if that was given in PEFT's own JSON."""

BY_ACCELERATE = frozenset({"deepspeed", "parallelism_config"})
"""Arguments of a plan that accelerate's own file brings in their place (:mod:`autotune.emit.launch`)."""


def training_arguments(plan: TrainingPlan, workload: Workload, rows: TrainingRows) -> dict[str, object]:
    """Return the arguments of ``trl TRAINER``: model and data first, then what the plan sets."""
    source, args = workload.model_source, find_trainer(plan.trainer).written_args(plan)
    # The script takes what is trained from a file, not from TRL's arguments.
    model = {name: value for name, value in plan.model.items() if not (plan.peft and name == "use_peft")}
    return {
        "model_name_or_path": source.name,
        **({"model_revision": source.revision} if source.revision != "main" else {}),
        **rows.arguments(),
        # A relative name, so that it stays valid when the bundle is moved.
        "output_dir": f"{short_name(source.name)}-{short_name(workload.dataset.name)}-{workload.trainer}",
        **({"reward_funcs": list(plan.rewards)} if plan.rewards else {}),
        **model,
        **{name: value for name, value in args.items() if name not in BY_ACCELERATE},
    }


def launch_arguments(processes: int, threads: int | None) -> dict[str, object]:
    """Return the arguments that ``trl`` passes on to ``accelerate launch``.

    By default, ``accelerate launch`` starts a process on every visible GPU, which multiplies the global batch, and
    sets OMP_NUM_THREADS to 1, which on a CPU trains on one core (accelerate 1.15, ``commands/launch.py``).

    Args:
        threads: CPU threads of each process; None where the machine's cores are not known: as accelerate sets them.
    """
    return {
        "num_processes": processes,
        **({"num_cpu_threads_per_process": threads} if threads is not None else {}),
    }


def short_name(name: str) -> str:
    """Return the last part of a hub id or a path, without the ending of a data file."""
    path = uncompressed(name)
    return path.stem if path.suffix in {".json", ".jsonl", ".csv", ".parquet"} else path.name
