"""``GRPOTrainer``: group-relative policy optimisation; the completions of a prompt are compared with one another."""

from __future__ import annotations

from autotune.core.plan import TrainingPlan
from autotune.trainers.base import ConfigFields
from autotune.trainers.generating import Generating


class GroupRelativePolicyOptimization(Generating):
    """Completions are generated for all micro-batches of a step at once; there is no reference unless asked for."""

    name = "grpo"
    label = "GRPO"
    title = "Group-relative policy optimisation"
    config_class = "GRPOConfig"
    trainer_class = "GRPOTrainer"
    fields = frozenset({
        "beta", "cache_implementation", "cast_lm_head_to_fp32", "chat_template_kwargs", "delta", "disable_dropout",
        "ds3_gather_for_generation", "entropy_coef", "entropy_coef_delta", "entropy_coef_max", "entropy_coef_min",
        "entropy_target", "epsilon", "epsilon_high", "generation_batch_size", "generation_kwargs",
        "importance_sampling_level", "log_completions", "log_completions_hub_repo", "log_multimodal",
        "log_unique_prompts", "loss_type", "mask_truncated_completions", "max_completion_length",
        "max_tool_calling_iterations", "min_p", "model_init_kwargs", "multi_objective_aggregation",
        "num_completions_to_print", "num_generations", "num_generations_eval", "num_iterations",
        "off_policy_mask_threshold", "pad_to_multiple_of", "ref_model_mixup_alpha", "ref_model_sync_steps",
        "repetition_penalty", "reward_weights", "router_aux_loss_coef", "sapo_temperature_neg", "sapo_temperature_pos",
        "scale_rewards", "shuffle_dataset", "steps_per_generation", "sync_ref_model", "temperature",
        "top_entropy_quantile", "top_k", "top_p", "transformers_continuous_batching_config", "trust_remote_code",
        "use_adaptive_entropy", "use_bias_correction_kl", "use_transformers_continuous_batching",
        "use_transformers_paged", "use_vllm", "vespo_k_neg", "vespo_k_pos", "vespo_lambda_neg", "vespo_lambda_pos",
        "vllm_enable_sleep_mode", "vllm_gpu_memory_utilization", "vllm_group_port", "vllm_importance_sampling_cap",
        "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min", "vllm_importance_sampling_correction",
        "vllm_importance_sampling_mode", "vllm_max_model_length", "vllm_mode", "vllm_model_impl",
        "vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout",
        "vllm_structured_outputs_regex", "vllm_tensor_parallel_size",
    })  # fmt: skip
    config_fields = ConfigFields(
        traced=frozenset({
            "cache_implementation", "cast_lm_head_to_fp32", "delta", "disable_dropout", "entropy_coef", "epsilon",
            "epsilon_high", "importance_sampling_level", "loss_type", "mask_truncated_completions", "min_p",
            "multi_objective_aggregation", "num_generations_eval", "off_policy_mask_threshold", "repetition_penalty",
            "reward_weights", "router_aux_loss_coef", "scale_rewards", "temperature", "top_entropy_quantile", "top_k",
            "top_p", "use_adaptive_entropy", "use_bias_correction_kl", "vllm_importance_sampling_clip_max",
            "vllm_importance_sampling_clip_min", "vllm_importance_sampling_correction", "vllm_importance_sampling_mode",
        }),
        # The class fills in steps_per_generation from generation_batch_size, and the other way round.
        without_effect=frozenset({
            "generation_batch_size",
            "chat_template_kwargs", "entropy_coef_delta", "entropy_coef_max", "entropy_coef_min", "entropy_target",
            "log_completions", "log_completions_hub_repo", "log_multimodal", "log_unique_prompts", "model_init_kwargs",
            "num_completions_to_print", "ref_model_mixup_alpha", "ref_model_sync_steps",
            "sapo_temperature_neg", "sapo_temperature_pos", "shuffle_dataset", "trust_remote_code", "vespo_k_neg",
            "vespo_k_pos", "vespo_lambda_neg", "vespo_lambda_pos", "vllm_group_port", "vllm_server_base_url",
            "vllm_server_host", "vllm_server_port", "vllm_server_timeout",
        }),
        assumed={"sync_ref_model": "the reference model is not synchronised in the traced steps"},
        reading=frozenset({"chat_template_kwargs"}),
    )  # fmt: skip

    def compares_with_old(self, plan: TrainingPlan, *, aligned: bool) -> bool:
        """GRPO needs them for completions of an earlier model, and for those of vLLM, whose numerics differ."""
        corrected = plan.args.get("use_vllm") and plan.args.get("vllm_importance_sampling_correction", True)
        return not aligned or bool(corrected)


TRAINER = GroupRelativePolicyOptimization()
