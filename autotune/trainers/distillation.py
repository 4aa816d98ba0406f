"""``DistillationTrainer``: the model completes prompts, and learns the distribution of a teacher at every token."""

from __future__ import annotations

from dataclasses import replace

from autotune.core.plan import TrainingPlan
from autotune.core.program import StepProgram
from autotune.core.workload import Workload
from autotune.trainers.declared import ConfigFields
from autotune.trainers.generating import GENERATING_FIELDS, Generating
from autotune.trainers.prompts import GENERATION

TEACHER_PASS = "teacher pass"
"""The forward pass of the teacher, without gradients, after that of the trained model."""
TEACHER, TEACHER_REVISION = "teacher_model_name_or_path", "teacher_model_revision"
"""The fields of ``DistillationConfig`` for the teacher's name and revision."""
TEACHER_LOADING = "teacher_model_init_kwargs"
"""The field with the keyword arguments for loading the teacher."""


class OnPolicyDistillation(Generating):
    """One completion to a prompt, generated for all micro-batches of a step at once, and no reward functions.

    The teacher stays on the device next to the model: TRL does not offload it, and loads it with the type and attention
    of the trained model (``trl/scripts/distillation.py``). The loss projects the hidden states of both to the
    vocabulary in tiles, so that full logits never exist.
    """

    label = "Distillation"
    title = "On-policy distillation"
    document_noun = "prompts"
    scores = False
    # As in ``_signature_columns`` of TRL's trainer; tools are an argument, not a column.
    further_columns = ("image", "images")
    has_teacher = True
    peculiarities = (
        "The teacher stays on the device for the whole training: TRL does not offload it.",
        "The teacher has the type of the trained weights.",
    )
    # `auto` would split a teacher that does not fit between the device and the host.
    loads_with = (*Generating.loads_with, TEACHER_LOADING)
    config_fields = GENERATING_FIELDS | ConfigFields(
        traced=frozenset({"beta", TEACHER_LOADING, TEACHER, TEACHER_REVISION}),
        others=frozenset({"max_tool_calling_iterations"}),
    )

    def phases(self, plan: TrainingPlan) -> StepProgram:
        """Return a program with a generation for each step, and a pass of the teacher in every micro-batch."""
        return StepProgram(in_step=(GENERATION,), in_micro_batch=(TEACHER_PASS,))

    def completed(self, plan: TrainingPlan, workload: Workload) -> TrainingPlan:
        """Return the plan with the teacher's resolved name."""
        plan, teacher = super().completed(plan, workload), workload.teacher_source
        if teacher is None:
            return plan
        named = teacher.revision != "main" or TEACHER_REVISION in plan.args
        revision = {TEACHER_REVISION: teacher.revision} if named else {}
        return replace(plan, args={**plan.args, TEACHER: teacher.name, **revision})


TRAINER = OnPolicyDistillation()
