"""``GRPOTrainer``: group-relative policy optimisation; the completions of a prompt are compared with one another."""

from __future__ import annotations

from dataclasses import replace

from autotune.core.plan import TrainingPlan
from autotune.trainers.groups import CONFIG_FIELDS, Groups


class GroupRelativePolicyOptimization(Groups):
    """Completions are generated for all micro-batches of a step at once; there is no reference unless asked for."""

    name = "grpo"
    label = "GRPO"
    title = "Group-relative policy optimisation"
    config_fields = replace(
        CONFIG_FIELDS,
        traced=CONFIG_FIELDS.traced | {
            "cast_lm_head_to_fp32", "delta", "entropy_coef", "importance_sampling_level", "loss_type",
            "multi_objective_aggregation", "off_policy_mask_threshold", "scale_rewards", "top_entropy_quantile",
            "use_adaptive_entropy", "use_bias_correction_kl", "vllm_importance_sampling_clip_max",
            "vllm_importance_sampling_clip_min", "vllm_importance_sampling_correction",
            "vllm_importance_sampling_mode",
        },
        without_effect=CONFIG_FIELDS.without_effect | {
            "entropy_coef_delta", "entropy_coef_max", "entropy_coef_min", "entropy_target",
            "log_completions_hub_repo", "sapo_temperature_neg", "sapo_temperature_pos", "vespo_k_neg", "vespo_k_pos",
            "vespo_lambda_neg", "vespo_lambda_pos",
        },
        others=CONFIG_FIELDS.others | {"max_tool_calling_iterations", "vllm_importance_sampling_cap"},
    )  # fmt: skip

    def compares_with_old(self, plan: TrainingPlan, *, aligned: bool) -> bool:
        """GRPO needs them for completions of an earlier model, and for those of vLLM, whose numerics differ."""
        corrected = plan.args.get("use_vllm") and plan.args.get("vllm_importance_sampling_correction", True)
        return not aligned or bool(corrected)


TRAINER = GroupRelativePolicyOptimization()
