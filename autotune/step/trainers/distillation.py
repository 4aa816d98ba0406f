"""``DistillationTrainer``: the model completes prompts, and a teacher scores every token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar
from unittest import mock

from autotune.core.plan import TrainingPlan
from autotune.step.trainers.generating import Generating, OnTokenizedPrompts
from autotune.trainers.distillation import TEACHER, TEACHER_PASS
from autotune.trainers.prompts import GENERATION, STAND_IN_SERVER

_PARALLEL = "vllm_tensor_parallel_size"


class _WithTeacher(OnTokenizedPrompts):
    """TRL's trainer, which counts the micro-batches of whole steps: their number sizes a generation batch."""

    accelerator: Any
    teacher_model: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        module = self.adapter.module
        # TRL limits vLLM's sequences to a generation batch.
        sequences = self.plan.rows * self.plan.micro_batches * (self.plan.number(_PARALLEL) or 1)
        make_connection = module.VLLMGeneration

        def limit_sequences(**arguments: Any) -> Any:
            return make_connection(**{**arguments, "max_num_seqs": sequences})

        # The trainer checks that vLLM is installed, which a trace does not need.
        needs_vllm = self.plan.args.get("vllm_mode") != STAND_IN_SERVER
        is_available = module.is_vllm_available if needs_vllm else lambda: True
        with mock.patch.multiple(module, VLLMGeneration=limit_sequences, is_vllm_available=is_available):
            super().__init__(*args, **kwargs)

    def get_train_dataloader(self) -> Any:
        with self.whole_steps():
            return super().get_train_dataloader()

    def _prepare_inputs(self, batch: Any) -> Any:
        with self.whole_steps():
            return super()._prepare_inputs(batch)

    def _get_last_hidden_state(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        if model is self.accelerator.unwrap_model(self.teacher_model):
            return self.teacher_pass(model, *args, **kwargs)
        return super()._get_last_hidden_state(model, *args, **kwargs)

    def teacher_pass(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the hidden states of the teacher."""
        return super()._get_last_hidden_state(*args, **kwargs)


class OnPolicyDistillation(Generating):
    """The child's side of ``autotune.trainers.distillation``."""

    on_rows = _WithTeacher
    methods: ClassVar[Mapping[str, str]] = {GENERATION: "_generate_single_turn", TEACHER_PASS: "teacher_pass"}

    def arguments(self, plan: TrainingPlan) -> Mapping[str, Any]:
        """Return the teacher's name, by which TRL loads it; rows are tokenised without one."""
        return {"teacher_model": plan.args[TEACHER]} if TEACHER in plan.args else {}
