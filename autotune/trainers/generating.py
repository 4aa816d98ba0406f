"""The base of trainers that generate completions for several micro-batches at once: GRPO, RLOO, distillation."""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from autotune.core.candidate import Candidate
from autotune.core.plan import TrainingPlan
from autotune.core.rows.batch_geometry import BatchGeometry, Layout, Shape
from autotune.core.rows.documents import Documents
from autotune.core.setting import Setting
from autotune.core.workload import Workload
from autotune.techniques.traits import MAX_TRACED
from autotune.trainers.declared import ConfigFields
from autotune.trainers.prompts import CONFIG_FIELDS, Prompted

COMPLETIONS = "completions"
"""Name of the rows of a global batch, several of which may be generated for each row of the dataset."""
GENERATING_FIELDS = CONFIG_FIELDS | ConfigFields(
    without_effect=frozenset({
        "chat_template_kwargs", "log_completions", "log_unique_prompts", "num_completions_to_print", "shuffle_dataset",
    }),
    reading=frozenset({"chat_template_kwargs"}),
    others=frozenset({"max_completion_length", "pad_to_multiple_of", "vllm_max_model_length"}),
)  # fmt: skip
"""The fields that the configurations of these trainers share."""


class Generating(Prompted):
    """Prompts whose completions are generated for one or more micro-batches at once.

    Prompts are never cut. A micro-batch is as wide as the longest prompt plus the longest completion of its generation
    batch: both are padded separately, before the generation batch is divided into micro-batches.
    """

    document_noun = COMPLETIONS
    # Rows are drawn by TRL's own sampler (``trl.trainer.utils.RepeatSampler``).
    shuffled_by = "shuffle_dataset"
    max_completion_field = "max_completion_length"

    def vllm_tokens(self, plan: TrainingPlan) -> int | None:
        """Return the plan's ``vllm_max_model_length``."""
        return plan.number("vllm_max_model_length")

    def layout(self, plan: TrainingPlan, rows: int) -> Layout:
        """Return the layout of a generation batch; a single completion needs no padding."""
        completions = rows * plan.steps_per_generation
        prompts = completions // gcd(self.copies(plan), completions)
        return super().layout(plan, prompts) if completions > 1 else Layout.EQUAL

    def rows_per_draw(self, plan: TrainingPlan) -> int:
        """Return the number of prompts in a generation batch of one process, shared ones included."""
        return self.padded_together(plan) // gcd(self.copies(plan), self.padded_together(plan))

    def rows_per_generation(self, plan: TrainingPlan) -> int:
        """Return the number of prompts in a generation batch of all processes (``trl.trainer.utils.RepeatSampler``)."""
        return max(1, self.padded_together(plan) * plan.data_ranks // self.copies(plan))

    def evaluation_geometry(self, plan: TrainingPlan, documents: Documents, rows: int) -> BatchGeometry:
        """Return the geometry of evaluation, in which each micro-batch generates its own completions."""
        sizes = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 1}
        found = self.geometry(replace(plan, args={**plan.args, **sizes}), documents)
        return replace(found, phases=(), rows=documents.rows * self.copies(plan))

    def traced_plan(self, plan: TrainingPlan, layout: Layout, shape: Shape) -> TrainingPlan:
        """Return a plan for a trace, with one generation for all micro-batches of a step."""
        traced, at = super().traced_plan(plan, layout, shape), dict(self.sizes_at(layout, shape))
        if shape.chosen:
            # Dataset rows are padded as in the plan.
            at.pop("pad_to_multiple_of", None)
        else:
            at["gradient_accumulation_steps"] = self.traced_together(plan)
        return replace(traced, args={**traced.args, **at})

    def traced_together(self, plan: TrainingPlan) -> int:
        """Return the micro-batches into which a trace divides a generation batch of the plan.

        The fewest equal ones, but several, so that groups of as many completions fit micro-batches of one row. A step
        of one micro-batch that also generates for no other is traced as such.
        """
        if plan.micro_batches == plan.steps_per_generation == 1:
            return 1
        completions = self.padded_together(plan)
        return next((parts for parts in range(MAX_TRACED, completions + 1) if completions % parts == 0), 1)

    def rows_generating_whole(self, plan: TrainingPlan) -> int:
        """Return the rows of each of the micro-batches into which a trace divides a generation batch."""
        return self.padded_together(plan) // self.traced_together(plan)

    def padded_together(self, plan: TrainingPlan) -> int:
        """Return the number of completions in a generation batch of one process."""
        return plan.rows * plan.steps_per_generation

    def rule(self, candidate: Candidate, setting: Setting) -> str | None:
        """Return the reason of :meth:`refused`."""
        return self.refused(self.plan(candidate, setting), setting.workload)

    def refused(self, plan: TrainingPlan, workload: Workload) -> str | None:
        """Return a reason if the dataset has fewer prompts than a generation batch: TRL drops incomplete batches."""
        prompts, present = self.rows_per_generation(plan), workload.dataset.documents.rows
        if prompts > present:
            return f"a generation batch needs {prompts} prompts, and the dataset has {present}"
        return super().refused(plan, workload)
