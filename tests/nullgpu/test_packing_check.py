"""The self-test of packing compiles FlexAttention's kernels for a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.nullgpu.machine import NEEDS_CUDA_BUILD, NullMachine

pytestmark = [*NEEDS_CUDA_BUILD, pytest.mark.nightly]

CHECK = """
    import json, sys
    from autotune.core.jobs.protocol import CheckPackingRequest
    from autotune.core.workload import ModelSource
    from autotune.step.jobs.check_packing import check_packing
    request = CheckPackingRequest("sft", ModelSource(sys.argv[1]), "cuda", ("flex_attention",))
    (found,) = check_packing(request, None)
    print(json.dumps([found.supported, found.reason]))
"""


def test_flex_attention_has_a_kernel_for_the_packed_row_where_heads_share_keys(
    machine: NullMachine, tmp_path: Path
) -> None:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 128, "num_hidden_layers": 2}
    config = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 256, **heads}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert machine.run(CHECK, str(tmp_path), TORCHINDUCTOR_FORCE_DISABLE_CACHES="1") == [True, ""]
