"""``RewardTrainer``: a model that scores answers. A document is two answers, each with its prompt: two sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from autotune.core.files.nested import mapping
from autotune.core.plan import TrainingPlan
from autotune.core.rows.batch_geometry import Layout, Shape
from autotune.core.rows.documents import Document
from autotune.core.workload import CHAT_TEMPLATE, Workload
from autotune.trainers.base import Trainer
from autotune.trainers.declared import ConfigFields, DatasetFormat

# trl.ModelConfig's default of lora_task_type, and the key of Liger's loss that is on by default.
_GENERATES, _FUSED = "CAUSAL_LM", "fused_linear_cross_entropy"


class RewardModelling(Trainer):
    """Pairs of a chosen and a rejected answer, padded together; a row with a longer answer is dropped whole."""

    label = "Reward"
    title = "Training of a reward model"
    # In the order in which RewardTrainer looks for them.
    formats = (
        DatasetFormat("chosen_ids+rejected_ids", ("chosen_ids", "rejected_ids"), tokenized=True),
        DatasetFormat(
            "chosen_input_ids+rejected_input_ids", ("chosen_input_ids", "rejected_input_ids"), tokenized=True
        ),
        DatasetFormat("prompt+chosen+rejected", ("prompt", "chosen", "rejected")),
        DatasetFormat("chosen+rejected", ("chosen", "rejected")),
    )
    loads_adapters = True
    optional_columns = ("margin",)
    parts = ("chosen", "rejected")
    config_fields = ConfigFields(
        traced=frozenset({"center_rewards_coefficient", "disable_dropout"}),
        without_effect=frozenset({
            "chat_template_path", "dataset_num_proc", "eos_token", "model_init_kwargs", "pad_token",
            "trust_remote_code",
        }),
        reading=frozenset({CHAT_TEMPLATE, "eos_token", "pad_token"}),
        others=frozenset({"activation_offloading", "max_length", "pad_to_multiple_of"}),
    )  # fmt: skip
    stand_in: ClassVar[Mapping[str, str]] = {"chosen": "a b", "rejected": "b a b"}
    also_set: ClassVar[Mapping[str, Mapping[str, object]]] = {
        # With it, PEFT trains the new head fully, without an adapter.
        "model.use_peft": {"model.lora_task_type": "SEQ_CLS"},
        "peft": {"peft.task_type": "SEQ_CLS"},
        # Liger's fused loss replaces the model's forward by a language model's. Other trainers disable it.
        "args.use_liger_kernel": {"args.liger_kernel_config": {_FUSED: False}},
    }

    def document(self, lengths: tuple[Any, ...]) -> Document:
        """Return both sequences; TRL drops a pair whose longer sequence exceeds the maximum length."""
        import numpy as np

        return (np.maximum(*lengths), *lengths)

    def traced_rows(self, layout: Layout, shape: Shape, trainable: float) -> tuple[tuple[int, ...], ...]:
        """Return pairs as long as the micro-batch; one sequence is a token shorter if rows are padded."""
        tokens = int(shape.tokens)
        shorter = tokens if layout is Layout.EQUAL else max(1, tokens - 1)
        return (*((tokens, tokens),) * (shape.rows - 1), (tokens, shorter))

    def refused(self, plan: TrainingPlan, workload: Workload) -> str | None:
        """Return a reason if a switch lacks an entry without which training fails (``also_set``)."""
        if plan.model.get("use_peft") and plan.model.get("lora_task_type", _GENERATES) == _GENERATES:
            return f"PEFT's {_GENERATES} adapters need a model that generates: write lora_task_type: SEQ_CLS"
        if plan.args.get("use_liger_kernel") and mapping(plan.args.get("liger_kernel_config")).get(_FUSED, True):
            return f"Liger's fused loss needs a model that generates: write liger_kernel_config: {{{_FUSED}: false}}"
        return None


TRAINER = RewardModelling()
