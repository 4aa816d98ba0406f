"""``RLOOTrainer``: REINFORCE with the other completions of a prompt as the baseline."""

from __future__ import annotations

from autotune.core.plan import TrainingPlan
from autotune.trainers.base import ConfigFields
from autotune.trainers.generating import Generating


class LeaveOneOut(Generating):
    """As GRPO, with a reference by default, and always with the old log-probabilities."""

    name = "rloo"
    label = "RLOO"
    title = "REINFORCE leave-one-out"
    config_class = "RLOOConfig"
    trainer_class = "RLOOTrainer"
    fields = frozenset({
        "beta", "cache_implementation", "chat_template_kwargs", "disable_dropout", "ds3_gather_for_generation",
        "epsilon", "epsilon_high", "generation_batch_size", "generation_kwargs", "log_completions",
        "log_multimodal", "log_unique_prompts", "mask_truncated_completions",
        "max_completion_length", "min_p", "model_init_kwargs", "normalize_advantages", "num_completions_to_print",
        "num_generations", "num_generations_eval", "num_iterations", "pad_to_multiple_of", "ref_model_mixup_alpha",
        "ref_model_sync_steps", "repetition_penalty", "reward_clip_range", "reward_weights", "router_aux_loss_coef",
        "shuffle_dataset", "steps_per_generation", "sync_ref_model", "temperature", "top_k", "top_p",
        "transformers_continuous_batching_config", "trust_remote_code", "use_transformers_continuous_batching",
        "use_transformers_paged", "use_vllm", "vllm_enable_sleep_mode", "vllm_gpu_memory_utilization",
        "vllm_group_port", "vllm_max_model_length", "vllm_mode", "vllm_model_impl", "vllm_server_base_url",
        "vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_structured_outputs_regex",
        "vllm_tensor_parallel_size",
    })  # fmt: skip
    config_fields = ConfigFields(
        traced=frozenset({
            "cache_implementation", "disable_dropout", "epsilon", "epsilon_high", "mask_truncated_completions", "min_p",
            "normalize_advantages", "num_generations_eval", "repetition_penalty", "reward_clip_range", "reward_weights",
            "router_aux_loss_coef", "temperature", "top_k", "top_p",
        }),
        # The class fills in steps_per_generation from generation_batch_size, and the other way round.
        without_effect=frozenset({
            "generation_batch_size",
            "chat_template_kwargs", "log_completions", "log_multimodal", "log_unique_prompts",
            "model_init_kwargs", "num_completions_to_print", "ref_model_mixup_alpha", "ref_model_sync_steps",
            "shuffle_dataset", "trust_remote_code", "vllm_group_port", "vllm_server_base_url", "vllm_server_host",
            "vllm_server_port", "vllm_server_timeout",
        }),
        assumed={"sync_ref_model": "the reference model is not synchronised in the traced steps"},
        reading=frozenset({"chat_template_kwargs"}),
    )  # fmt: skip

    def compares_with_old(self, plan: TrainingPlan, *, aligned: bool) -> bool:
        """RLOO always does."""
        return True


TRAINER = LeaveOneOut()
