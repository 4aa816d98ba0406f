"""Arguments of plans with several processes, and the mark of tests that need DeepSpeed."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")


def fsdp2(**fields: object) -> dict[str, Any]:
    """Return the arguments of FSDP2; ``fields`` are those of ``fsdp_config``."""
    return {"fsdp": True, "fsdp_config": {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", **fields}}


def context_parallel(ranks: int, shards: int) -> dict[str, Any]:
    """Return the arguments of FSDP2 with so many ranks to a micro-batch, and so many micro-batches at once."""
    return {**fsdp2(), "parallelism_config": {"cp_size": ranks, "dp_shard_size": shards}}


def zero(stage: int, **fields: object) -> dict[str, Any]:
    """Return the arguments of ZeRO, with the rest of the document that transformers' guide gives."""
    document = {
        "zero_optimization": {"stage": stage, "reduce_bucket_size": "auto", **fields},
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_allow_untested_optimizer": True,
    }
    return {"deepspeed": document}
