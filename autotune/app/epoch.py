"""Computes the epoch of a candidate from its batch geometry."""

from __future__ import annotations

from autotune.core.candidate import Candidate
from autotune.core.plan import TrainingPlan
from autotune.core.rows.batch_geometry import BatchGeometry
from autotune.core.rows.epoch import Epoch
from autotune.core.workload import Workload
from autotune.trainers.base import Trainer
from autotune.trainers.length_limit import length_limit
from autotune.trainers.problem import TrainerProblem


def epoch_of(
    candidate: Candidate, problem: TrainerProblem, tokens_per_second: float | None, *, drops_last: bool = False
) -> Epoch:
    """Return the epoch of a candidate at a token rate.

    Args:
        drops_last: whether rows that do not fill a micro-batch of each process are dropped (``dataloader_drop_last``).
    """
    setting = problem.setting
    plan = problem.trainer.plan(candidate, setting)
    geometry = problem.trainer.geometry(plan, setting.workload.dataset.documents)
    every = rows_of_epoch(plan, geometry, problem.trainer, setting.workload)
    rows, length = plan.rows_loaded(every, drops_last=drops_last), plan.args.get("max_length")
    tokens = geometry.tokens / plan.rows * rows
    kept = length_limit(problem.trainer, setting, candidate)
    return Epoch(
        token_coverage=kept.coverage if kept is not None else 1.0,
        row_coverage=kept.row_coverage if kept is not None else 1.0,
        max_length=length if isinstance(length, int) else plan.truncate_to,
        per_device_train_batch_size=plan.rows,
        gradient_accumulation_steps=plan.micro_batches,
        documents_per_step=geometry.documents,
        tokens_per_step=geometry.tokens_per_step,
        steps_per_epoch=plan.steps_of_epoch(every, drops_last=drops_last),
        seconds_per_epoch=tokens / tokens_per_second if tokens_per_second else None,
    )


def rows_of_epoch(plan: TrainingPlan, geometry: BatchGeometry, trainer: Trainer, workload: Workload) -> int:
    """Return the number of rows of an epoch, packed or not, without those that TRL splits off for evaluation."""
    left, every = workload.documents_trained, workload.dataset.documents.rows
    return round(geometry.rows * trainer.rows_of_epoch(plan, left) / trainer.rows_of_epoch(plan, every))
