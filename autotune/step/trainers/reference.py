"""The model that a trainer asks for log-probabilities of a reference, before it trains."""

from __future__ import annotations

from typing import Any

from trl.models import prepare_deepspeed


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
