"""The techniques that TRL's guides name, section by section, and their counterparts here.

The guides are all versions of "Reducing Memory Usage" and "Speeding Up Training". A section has this project's words if
the guide's heading does not name its subject.
"""

from __future__ import annotations

from collections.abc import Mapping

MEMORY = "Reducing Memory Usage"
SPEED = "Speeding Up Training"

GUIDES: Mapping[tuple[str, str], tuple[str, ...]] = {
    (MEMORY, "Truncation"): ("max_length",),
    (MEMORY, "Truncation of the completion: `max_completion_length`"): ("max_length", "max_completion_length"),
    (MEMORY, "Truncation of the prompt: `max_prompt_length`"): ("max_length", "prompt_coverage"),
    (MEMORY, "How to choose `max_length`"): ("max_length",),
    (MEMORY, "Packing, and its strategies"): ("packing",),
    (MEMORY, "PEFT"): ("lora", "peft_config"),
    (MEMORY, "PEFT on quantised weights"): ("quantization",),
    (MEMORY, "Liger"): ("liger",),
    (MEMORY, "Padding-free"): ("padding_free",),
    (MEMORY, "Activation offloading"): ("activation_offloading",),
    (MEMORY, "Padding sequences to a multiple"): ("pad_to_multiple_of",),
    (MEMORY, "No gathering of weights for generation"): ("ds3_gather_for_generation",),
    (MEMORY, "Context parallelism"): ("context_parallel",),
    (MEMORY, "vLLM sleep mode"): ("vllm",),
    (MEMORY, "Gradient checkpointing"): ("gradient_checkpointing",),
    (SPEED, "vLLM for generation"): ("vllm",),
    (SPEED, "Optimized attention: FlashAttention"): ("attention",),
    (SPEED, "Optimized attention: kernels of the Hub, paged attention too"): ("attention", "continuous_batching"),
    (SPEED, "PEFT"): ("lora", "peft_config"),
    (SPEED, "Liger"): ("liger",),
    (SPEED, "Gradient checkpointing"): ("gradient_checkpointing",),
    (SPEED, "Mixed precision"): ("precision",),
}
"""By guide and section, the techniques."""

ELSEWHERE: Mapping[str, str] = {
    "prompt_coverage": "TRL cuts no prompts from 0.29 on: the option `--prompt-coverage` drops the longest instead",
}
"""What the guides name and no technique here is, with the reason."""
