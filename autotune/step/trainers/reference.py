"""The model that a trainer asks for log-probabilities of a reference: where it comes from, and how long it stays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trl.models import prepare_deepspeed

from autotune.core.plan import TrainingPlan
from autotune.step.distributed.engines import Engine, engine_of


def reference_beside(plan: TrainingPlan | None, make_model: Callable[[], Any]) -> Mapping[str, Any]:
    """Return the argument with a reference model where TRL would load one, from a path that random weights have not.

    With adapters it needs none, and none to precompute (``precompute_ref_log_probs``) but with FSDP, which shards the
    model only when it trains (trl 1.16, ``DPOTrainer.__init__``).
    """
    if plan is not None:
        precomputed = plan.args.get("precompute_ref_log_probs") and engine_of(plan) is not Engine.FSDP2
        if plan.model.get("use_peft") or precomputed:
            return {}
    return {"ref_model": make_model()}


def drop_precomputed(trainer: Any) -> None:
    """Drop the reference model of a trainer that has asked it all, as TRL does with one that it has loaded itself."""
    if trainer.is_fsdp_enabled and trainer.precompute_ref_logps:
        trainer.ref_model = None


def reference_of(trainer: Any) -> Any:
    """Return the reference, or the model itself where that is asked before training (``precompute_ref_log_probs``).

    By then DeepSpeed has not placed the model yet, so TRL wraps it in an engine for inference (trl 1.16,
    ``DPOTrainer._precompute_ref_logps``).
    """
    if trainer.ref_model is not None or not trainer.is_deepspeed_enabled:
        return trainer.ref_model or trainer.model
    if getattr(trainer, "_precompute_engine", None) is None:
        trainer._precompute_engine = prepare_deepspeed(trainer.model, trainer.accelerator)
    return trainer._precompute_engine
