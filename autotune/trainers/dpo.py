"""``DPOTrainer``: preference optimisation. A document is a prompt with two answers, so two sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from autotune.core.plan import TrainingPlan
from autotune.core.program import PRECOMPUTE, StepProgram
from autotune.core.rows.batch_geometry import Layout, Shape
from autotune.core.rows.documents import Document
from autotune.techniques.max_length import TRUNCATION
from autotune.techniques.per_device_train_batch_size import ROWS
from autotune.trainers.base import Trainer
from autotune.trainers.declared import ConfigFields, DatasetFormat

REFERENCE_PASS = "reference pass"
"""The forward pass of the reference in each micro-batch."""
REFERENCE_PASS_NOTE = (
    "Speeds with reference=precomputed include its pass over the dataset, divided by num_train_epochs (TRL's default "
    "is 3) or spread over max_steps: the fewer epochs or steps, the smaller the gain."
)
"""Note on trainings for another number of epochs (``TrainingPlan.pass_share``)."""

_SORTED = "this loss sorts the rows of each micro-batch, and compares rows of equal rank"
_ACROSS_ROWS = {
    "aot": _SORTED,
    "aot_unpaired": _SORTED,
    "sft": "loss_type=sft is a mean over the tokens of each micro-batch, whose number varies",
}
"""By ``loss_type``, why a loss of ``DPOTrainer._compute_loss`` is not a mean over rows."""


class PreferenceOptimization(Trainer):
    """Pairs of a chosen and a rejected answer, padded together; a frozen reference computes the log-probabilities."""

    label = "DPO"
    title = "Direct preference optimisation"
    formats = (
        DatasetFormat("prompt+chosen+rejected", ("prompt", "chosen", "rejected"), with_images=True),
        # TRL uses the common beginning of both answers as the prompt (trl.data_utils.extract_prompt).
        DatasetFormat("chosen+rejected", ("chosen", "rejected"), splits=True),
    )
    ignores_bias_buffers = True
    # TRL refuses a precomputed reference for rows with images.
    text_peculiarities = (REFERENCE_PASS_NOTE,)
    takes_images = True
    parts = ("prompt", "chosen", "rejected")
    config_fields = ConfigFields(
        traced=frozenset({
            "beta", "disable_dropout", "discopop_tau", "f_alpha_divergence_coef", "f_divergence_type",
            "label_smoothing", "ld_alpha", "loss_type", "loss_weights", "precompute_ref_batch_size",
            "router_aux_loss_coef", "sync_ref_model", TRUNCATION, "use_weighting",
        }),
        without_effect=frozenset({
            "dataset_num_proc", "model_init_kwargs", "pad_token", "padding_free", "ref_model_mixup_alpha",
            "ref_model_sync_steps", "trust_remote_code",
        }),
        reading=frozenset({"pad_token", TRUNCATION}),
        others=frozenset({
            "activation_offloading", "max_length", "pad_to_multiple_of", "precompute_ref_log_probs",
        }),
    )  # fmt: skip

    stand_in: ClassVar[Mapping[str, object]] = {"prompt": "a b", "chosen": " a b", "rejected": " b a b"}

    def document(self, lengths: tuple[Any, ...]) -> Document:
        """Return both sequences; TRL drops a pair whose prompt alone fills the maximum length."""
        prompt, chosen, rejected = lengths
        return (prompt + 1, prompt + chosen, prompt + rejected)

    def own_loss(self, args: Mapping[str, object]) -> Mapping[str, str]:
        """Return the dependence on a micro-batch's rows: they are compared with one another, or averaged by token."""
        losses = args.get("loss_type")
        named = losses if isinstance(losses, list | tuple) else [losses]
        across = next((how for loss, how in _ACROSS_ROWS.items() if loss in named), None)
        return {} if across is None else {ROWS: across}

    def traced_rows(self, layout: Layout, shape: Shape, trainable: float) -> tuple[tuple[int, ...], ...]:
        """Return pairs of sequences as long as the micro-batch; one is a token shorter if rows are padded."""
        tokens, shorter = int(shape.tokens), int(layout is not Layout.EQUAL)
        # A shortened answer keeps at least one token.
        answer = max(1, min(tokens - 1, max(1 + shorter, round(tokens * trainable))))
        pair, last = (tokens - answer, answer, answer), (tokens - answer, answer, max(1, answer - shorter))
        return (*(pair,) * (shape.rows - 1), last)

    def phases(self, plan: TrainingPlan) -> StepProgram:
        """Return phases with the reference's pass: over the dataset beforehand, or in each micro-batch."""
        if plan.args.get("precompute_ref_log_probs"):
            return StepProgram(before=(PRECOMPUTE,))
        return StepProgram(in_micro_batch=(REFERENCE_PASS,))


TRAINER = PreferenceOptimization()
