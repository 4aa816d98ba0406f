"""``OnlineDPOTrainer``: two completions of each prompt are generated, scored, and compared as in DPO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autotune.core.candidate import Candidate
from autotune.core.plan import TrainingPlan
from autotune.core.program import StepProgram
from autotune.core.rows.batch_geometry import Layout, Shape
from autotune.core.setting import Setting
from autotune.core.workload import Workload
from autotune.techniques.per_device_train_batch_size import ROWS
from autotune.techniques.sharding import DDP, ZERO_STAGES, Sharding
from autotune.techniques.vllm import NAME as VLLM
from autotune.techniques.vllm import SLEEPING, is_colocated, too_long_for_model
from autotune.trainers.declared import ConfigFields
from autotune.trainers.prompts import CONFIG_FIELDS, GENERATION, REFERENCE_PASS, SCORING, Prompted

COMPLETIONS = 2
"""Completions of each prompt; TRL has no field for it."""


class OnlineDirectPreferenceOptimization(Prompted):
    """Each micro-batch generates its own completions, which the reference and the trained model score.

    Generation uses whole prompts. For the loss, the beginning of the prompt is cut so that prompt and completion have
    at most ``max_length`` tokens; no row is dropped. TRL has no command for this trainer, and its class is
    experimental. Its inherited evaluation passes the dataset's columns to the model, and fails.
    """

    label = "Online DPO"
    title = "Online direct preference optimisation"
    evaluates = False
    has_command = False
    module = "trl.experimental.online_dpo"
    loads_by_name = False
    document_noun = "prompts"
    peculiarities = (
        (
            "With gradient checkpointing, TRL's default, OnlineDPOTrainer generates without a key-value cache: each "
            "generated token costs a full forward pass over the sequence so far."
        ),
        "OnlineDPOTrainer computes the logits of the whole vocabulary for every token.",
        "OnlineDPOTrainer keeps the type of the checkpoint's weights.",
        "OnlineDPOTrainer sums the gradients of a step's micro-batches; only DeepSpeed averages them.",
    )
    max_completion_field = "max_new_tokens"
    completions_per_row = COMPLETIONS
    sends_text = True
    config_fields = CONFIG_FIELDS | ConfigFields(
        traced=frozenset({"beta", "loss_type", "missing_eos_penalty", "reward_weights"}),
        # The trainer never reads it.
        without_effect=frozenset({"reward_model_path"}),
        others=frozenset({"max_length", "max_new_tokens"}),
    )

    def vllm_tokens(self, plan: TrainingPlan) -> int | None:
        """Return TRL's sum: ``max_length`` plus a completion."""
        return plan.count("max_length") + plan.count(self.max_completion_field)

    def traced_plan(self, plan: TrainingPlan, layout: Layout, shape: Shape) -> TrainingPlan:
        """Return a plan for a trace, without vLLM: the adapter replaces TRL's own method of generation."""
        traced = super().traced_plan(plan, layout, shape)
        return replace(traced, args={name: value for name, value in traced.args.items() if name != "use_vllm"})

    def padded_together(self, plan: TrainingPlan) -> int:
        """Return the number of completions of a micro-batch."""
        return COMPLETIONS * plan.rows

    def completed(self, plan: TrainingPlan, workload: Workload) -> TrainingPlan:
        """Return the plan; TRL pads vLLM's completions to their maximum length."""
        plan = super().completed(plan, workload)
        if not plan.args.get("use_vllm") or plan.completions is None:
            return plan
        widest = float(plan.count(self.max_completion_field))
        return replace(plan, completions=replace(plan.completions, widest=widest))

    def own_loss(self, args: Mapping[str, object]) -> Mapping[str, str]:
        """Return the dependence on a step's micro-batches: losses are summed (``training_step`` of TRL's class)."""
        how = "TRL sums the losses of a step's micro-batches instead of averaging them, and max_grad_norm clips the sum"
        return {ROWS: how}

    def scored(self, plan: TrainingPlan, prompt: int, completion: int) -> int:
        """Return the tokens that ``max_length`` leaves; it only cuts prompts."""
        return max(completion, min(prompt + completion, plan.count("max_length")))

    def phases(self, plan: TrainingPlan) -> StepProgram:
        """Return a program with a generation at the start of every micro-batch."""
        return StepProgram(leading=(GENERATION,), in_micro_batch=(REFERENCE_PASS, SCORING))

    def rule(self, candidate: Candidate, setting: Setting) -> str | None:
        """Return why TRL cannot train a candidate."""
        plan = self.plan(candidate, setting)
        if refused := self.refused(plan, setting.workload):
            return refused
        most, cut = plan.count(self.max_completion_field), plan.count("max_length")
        reason = None
        if is_colocated(candidate):
            reason = _refused_by_vllm(setting, cut, cut + most) or _sleep_refused(candidate, plan.micro_batches)
        return reason or (_gradient_changed(candidate, setting) if plan.micro_batches > 1 else None)

    def refused(self, plan: TrainingPlan, workload: Workload) -> str | None:
        """Return a reason if the plan evaluates."""
        if plan.evaluates:
            return f"{self.trainer_class} has no evaluation: it would pass the raw prompts to the model"
        return super().refused(plan, workload)

    def unintended(self, candidate: Candidate, setting: Setting) -> str | None:
        """Return the unintended loss if completions leave no room for prompts.

        ``OnlineDPOTrainer._forward`` then passes only the completions, and does not shift their logits by one token:
        TRL 1.16 trains with them, and its configuration only warns.
        """
        plan = self.plan(candidate, setting)
        most, cut = plan.count(self.max_completion_field), plan.count("max_length")
        if most < cut:
            return None
        return (
            f"completions of {most:,} tokens (max_new_tokens) leave no room for prompts in max_length={cut:,}: TRL "
            f"computes the loss of completions of {cut:,} tokens or more without their prompts, and scores each token "
            "by logits that depend on it"
        )


def _refused_by_vllm(setting: Setting, cut: int, longest: int) -> str | None:
    """Return why vLLM would refuse TRL's maximum model length, or the longest prompt."""
    prompt = setting.workload.dataset.documents.longest
    if prompt > cut:
        return f"the longest prompt has {prompt:,} tokens, and vLLM accepts only prompts of up to max_length={cut:,}"
    return too_long_for_model(setting.workload.model, longest)


def _gradient_changed(candidate: Candidate, setting: Setting) -> str | None:
    """Return why an engine changes the gradient: DeepSpeed divides losses by the number of a step's micro-batches."""
    knob, own = Sharding.name, setting.base.choices if setting.base is not None else {}
    if knob in setting.allowed or (candidate[knob] in ZERO_STAGES) is (own.get(knob, DDP) in ZERO_STAGES):
        return None
    return (
        "DeepSpeed averages the losses of a step's micro-batches; without it, TRL's online DPO sums them"
        f" (--allow {knob})"
    )


def _sleep_refused(candidate: Candidate, micro_batches: int) -> str | None:
    """Return why vLLM cannot sleep between the micro-batches of a step.

    It drops its weights, and TRL sends them again only once in a step (``_generate_vllm_colocate``).
    """
    if candidate[VLLM] != SLEEPING or micro_batches == 1:
        return None
    return "TRL's online DPO does not send vLLM its weights again within an optimizer step of several micro-batches"


TRAINER = OnlineDirectPreferenceOptimization()
