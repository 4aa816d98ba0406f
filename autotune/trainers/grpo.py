"""``GRPOTrainer``: group-relative policy optimisation; the completions of a prompt are compared with one another."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.core.plan import TrainingPlan
from autotune.core.workload import Workload
from autotune.techniques.per_device_train_batch_size import ROWS
from autotune.techniques.steps_per_generation import NAME as GENERATED_TOGETHER
from autotune.trainers.declared import ConfigFields
from autotune.trainers.groups import GROUPS_FIELDS, Groups
from autotune.units import plural

_OVER_TOKENS = frozenset({"cispo", "dapo", "vespo"})
"""Losses divided by ``num_items_in_batch``, the tokens of a generation batch (``GRPOTrainer._compute_loss``)."""


class GroupRelativePolicyOptimization(Groups):
    """Completions are generated for all micro-batches of a step at once; there is no reference by default."""

    label = "GRPO"
    title = "Group-relative policy optimisation"
    config_fields = GROUPS_FIELDS | ConfigFields(
        traced=frozenset({
            "cast_lm_head_to_fp32", "delta", "entropy_coef", "importance_sampling_level", "loss_type",
            "multi_objective_aggregation", "off_policy_mask_threshold", "scale_rewards", "top_entropy_quantile",
            "use_adaptive_entropy", "use_bias_correction_kl", "vllm_importance_sampling_clip_max",
            "vllm_importance_sampling_clip_min", "vllm_importance_sampling_correction",
            "vllm_importance_sampling_mode",
        }),
        without_effect=frozenset({
            "entropy_coef_delta", "entropy_coef_max", "entropy_coef_min", "entropy_target",
            "log_completions_hub_repo", "sapo_temperature_neg", "sapo_temperature_pos", "vespo_k_neg", "vespo_k_pos",
            "vespo_lambda_neg", "vespo_lambda_pos",
        }),
        others=frozenset({"max_tool_calling_iterations", "vllm_importance_sampling_cap"}),
    )  # fmt: skip

    def own_loss(self, args: Mapping[str, object]) -> Mapping[str, str]:
        """Return how the loss depends on the other rows of a generation batch and of a micro-batch."""
        found, loss = dict[str, str](), args.get("loss_type", "dapo")
        if loss in _OVER_TOKENS:
            found[GENERATED_TOGETHER] = f"loss_type={loss} is a mean over the tokens that are generated at once"
        elif args.get("scale_rewards") == "batch" or args.get("multi_objective_aggregation") == "normalize_then_sum":
            found[GENERATED_TOGETHER] = "rewards are scaled over the completions that are generated at once"
        if loss == "bnpo":
            found[ROWS] = "loss_type=bnpo is a mean over the tokens of each micro-batch"
        elif args.get("entropy_coef") or args.get("use_adaptive_entropy"):
            found[ROWS] = "the entropy is a mean over the tokens of each micro-batch"
        elif args.get("top_entropy_quantile", 1.0) != 1.0:
            found[ROWS] = "the tokens with the highest entropy are selected within each micro-batch"
        return found

    def refused(self, plan: TrainingPlan, workload: Workload) -> str | None:
        """Return a reason if prompts with and without images are completed together.

        ``GRPOTrainer._tokenize_prompts`` passes None for a prompt without images, at which processors raise a
        TypeError; without any image in a generation, it passes none.
        """
        together = [(workload.dataset, self.rows_per_draw(plan))]
        if plan.evaluates and workload.evaluation is not None:
            completions = plan.count("per_device_eval_batch_size")
            together.append((workload.evaluation, completions // self.copies(plan, evaluated=True)))
        for profile, prompts in together:
            without = 0 if profile.images is None else profile.images.in_row.counts.get(0, 0)
            if prompts > 1 and without:
                return (
                    "TRL generates for several prompts with images only if all of them have some, and "
                    f"{plural(without, 'prompt')} of {profile.documents.rows} {'has' if without == 1 else 'have'} none"
                )
        return super().refused(plan, workload)

    def compares_with_old(self, plan: TrainingPlan, *, aligned: bool) -> bool:
        """GRPO needs them for completions of an earlier model, and for those of vLLM, whose numerics differ."""
        corrected = plan.args.get("use_vllm") and plan.args.get("vllm_importance_sampling_correction", True)
        return not aligned or bool(corrected)


TRAINER = GroupRelativePolicyOptimization()
