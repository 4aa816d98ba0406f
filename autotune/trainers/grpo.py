"""``GRPOTrainer``: group-relative policy optimisation; the completions of a prompt are compared with one another."""

from __future__ import annotations

from autotune.core.plan import TrainingPlan
from autotune.trainers.base import ConfigFields
from autotune.trainers.groups import FIELDS, TRACED, WITHOUT_EFFECT, Groups


class GroupRelativePolicyOptimization(Groups):
    """Completions are generated for all micro-batches of a step at once; there is no reference unless asked for."""

    name = "grpo"
    label = "GRPO"
    title = "Group-relative policy optimisation"
    config_class = "GRPOConfig"
    trainer_class = "GRPOTrainer"
    fields = FIELDS | {
        "cast_lm_head_to_fp32", "delta", "entropy_coef", "entropy_coef_delta", "entropy_coef_max", "entropy_coef_min",
        "entropy_target", "importance_sampling_level", "log_completions_hub_repo", "loss_type",
        "max_tool_calling_iterations", "multi_objective_aggregation", "off_policy_mask_threshold",
        "sapo_temperature_neg", "sapo_temperature_pos", "scale_rewards", "top_entropy_quantile",
        "use_adaptive_entropy", "use_bias_correction_kl", "vespo_k_neg", "vespo_k_pos", "vespo_lambda_neg",
        "vespo_lambda_pos", "vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max",
        "vllm_importance_sampling_clip_min", "vllm_importance_sampling_correction", "vllm_importance_sampling_mode",
    }  # fmt: skip
    config_fields = ConfigFields(
        traced=TRACED | {
            "cast_lm_head_to_fp32", "delta", "entropy_coef", "importance_sampling_level", "loss_type",
            "multi_objective_aggregation", "off_policy_mask_threshold", "scale_rewards", "top_entropy_quantile",
            "use_adaptive_entropy", "use_bias_correction_kl", "vllm_importance_sampling_clip_max",
            "vllm_importance_sampling_clip_min", "vllm_importance_sampling_correction",
            "vllm_importance_sampling_mode",
        },
        without_effect=WITHOUT_EFFECT | {
            "entropy_coef_delta", "entropy_coef_max", "entropy_coef_min", "entropy_target",
            "log_completions_hub_repo", "sapo_temperature_neg", "sapo_temperature_pos", "vespo_k_neg", "vespo_k_pos",
            "vespo_lambda_neg", "vespo_lambda_pos",
        },
        assumed={"sync_ref_model": "the reference model is not synchronised in the traced steps"},
        reading=frozenset({"chat_template_kwargs"}),
    )  # fmt: skip

    def compares_with_old(self, plan: TrainingPlan, *, aligned: bool) -> bool:
        """GRPO needs them for completions of an earlier model, and for those of vLLM, whose numerics differ."""
        corrected = plan.args.get("use_vllm") and plan.args.get("vllm_importance_sampling_correction", True)
        return not aligned or bool(corrected)


TRAINER = GroupRelativePolicyOptimization()
