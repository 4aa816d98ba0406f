"""``reference``: when the log-probabilities of a frozen reference model are computed."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.core.candidate import Candidate, Choice
from autotune.core.setting import Setting
from autotune.techniques.base import Equipped, Option
from autotune.techniques.trace_impact import TraceImpact

PRECOMPUTED = "precomputed"
SYNCHRONISED = "args.sync_ref_model"
"""The entry of a user's configuration whose reference follows the trained model."""
SYNCHRONISED_WHOLE = (
    "sync_ref_model with ZeRO-3 is not planned: every ref_model_sync_steps steps, TRL gathers all weights of the model"
    " and of its reference on each GPU at once, and neither traces nor probes run so many steps"
)
"""Why there is no prediction or measurement (trl/trainer/callbacks.py, ``SyncRefModelCallback.sync_target_model``)."""


class Reference(Equipped):
    """``precompute_ref_log_probs``. With adapters, the model without them is the reference, at no extra memory."""

    summary = "Computes the reference model's log-probabilities in each micro-batch, or once before training."
    options = (
        Option("per_batch", "a frozen copy of the model, or the model without its adapters, in each micro-batch"),
        Option(PRECOMPUTED, "one pass over the dataset, then no copy; its time is spread over all epochs"),
    )
    with_images = "TRL refuses it for rows with images"
    writes = frozenset({"args.precompute_ref_log_probs"})
    # Precomputing avoids the copy of the model.
    impact = TraceImpact(patches_libraries=False, frees_weights=lambda choice: choice == PRECOMPUTED)

    def conflict(self, choice: Choice, candidate: Candidate, setting: Setting) -> str | None:
        """Return a reason if the user's configuration synchronises the reference with the trained model."""
        if choice == PRECOMPUTED and setting.users_entry(SYNCHRONISED):
            return f"TRL refuses reference={PRECOMPUTED} with sync_ref_model, which updates the reference in training"
        return None

    def plan(self, choice: Choice, candidate: Candidate, setting: Setting) -> Mapping[str, object]:
        """See :class:`Technique`."""
        return {"args.precompute_ref_log_probs": choice == PRECOMPUTED}
