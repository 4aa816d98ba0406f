"""Batch geometry with evaluation: its micro-batches are built like those of training, from other rows."""

from __future__ import annotations

from dataclasses import replace

from autotune.core.batch_geometry import BatchGeometry
from autotune.core.plan import TrainingPlan
from autotune.core.workload import Workload
from autotune.trainers.base import Trainer
from autotune.trainers.geometry import evaluated_rows_of


def whole_geometry(trainer: Trainer, plan: TrainingPlan, workload: Workload) -> BatchGeometry:
    """Return the micro-batches and steps of a plan on a workload, those of evaluation included."""
    geometry = trainer.geometry(plan, workload.dataset.documents)
    if workload.evaluation is None or not plan.evaluates:
        return geometry
    documents = workload.evaluation.documents
    rows = min(evaluated_rows_of(plan), documents.rows * trainer.evaluated_copies(plan))
    return replace(geometry, evaluation=trainer.evaluated(plan, documents, rows))
