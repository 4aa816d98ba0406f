"""Batch geometry on a workload: that of its rows to train on, with their images, and of those to evaluate on."""

from __future__ import annotations

from dataclasses import replace

from autotune.core.batch_geometry import BatchGeometry
from autotune.core.plan import TrainingPlan
from autotune.core.workload import DatasetProfile, Workload
from autotune.trainers.base import Trainer
from autotune.trainers.geometry import evaluated_rows_of, number
from autotune.trainers.pictured import Pictured, with_images


def whole_geometry(trainer: Trainer, plan: TrainingPlan, workload: Workload) -> BatchGeometry:
    """Return the micro-batches and steps of a plan on a workload, those of evaluation included."""
    geometry = trainer.geometry(plan, workload.dataset.documents)
    geometry = _pictured(geometry, trainer, plan, workload.dataset, trainer.drawn(plan))
    if workload.evaluation is None or not plan.evaluates:
        return geometry
    documents = workload.evaluation.documents
    copies = trainer.evaluated_copies(plan)
    rows = min(evaluated_rows_of(plan), documents.rows * copies)
    evaluation = trainer.evaluated(plan, documents, rows)
    evaluation = _pictured(evaluation, trainer, plan, workload.evaluation, max(1, rows // copies), evaluated=copies)
    return replace(geometry, evaluation=evaluation)


def _pictured(
    geometry: BatchGeometry,
    trainer: Trainer,
    plan: TrainingPlan,
    profile: DatasetProfile,
    drawn: int,
    *,
    evaluated: int = 0,
) -> BatchGeometry:
    """Return a geometry of rows of the dataset if these have images."""
    if profile.images is None:
        return geometry
    rows = Pictured(
        trainer.loads(plan, profile.images, drawn),
        profile.images.alike,
        drawn,
        multiple=number(plan, "pad_to_multiple_of") or 1,
        blocks=trainer.ordered,
        evaluated=evaluated,
    )
    return with_images(geometry, rows)
