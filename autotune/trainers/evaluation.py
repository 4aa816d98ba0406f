"""Batch geometry on a workload: that of its rows to train on, with their images, and of those to evaluate on."""

from __future__ import annotations

from dataclasses import replace

from autotune.core.batch_geometry import BatchGeometry
from autotune.core.plan import TrainingPlan
from autotune.core.workload import DatasetProfile, Workload
from autotune.trainers.base import Trainer
from autotune.trainers.geometry import evaluated_rows_of, number
from autotune.trainers.pictured import with_images


def whole_geometry(trainer: Trainer, plan: TrainingPlan, workload: Workload) -> BatchGeometry:
    """Return the micro-batches and steps of a plan on a workload, those of evaluation included."""
    geometry = _pictured(trainer.geometry(plan, workload.dataset.documents), plan, workload.dataset)
    if workload.evaluation is None or not plan.evaluates:
        return geometry
    documents = workload.evaluation.documents
    rows = min(evaluated_rows_of(plan), documents.rows * trainer.evaluated_copies(plan))
    evaluation = _pictured(trainer.evaluated(plan, documents, rows), plan, workload.evaluation, evaluated=True)
    return replace(geometry, evaluation=evaluation)


def _pictured(
    geometry: BatchGeometry, plan: TrainingPlan, profile: DatasetProfile, *, evaluated: bool = False
) -> BatchGeometry:
    """Return a geometry of rows of the dataset if these have images."""
    if profile.images is None:
        return geometry
    return with_images(geometry, profile.images, number(plan, "pad_to_multiple_of") or 1, evaluated=evaluated)
