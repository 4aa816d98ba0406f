"""``autotune.plan`` splits several GPUs between a vLLM server and the training."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import autotune
from autotune.core.candidate import Choice
from tests.app.test_plan_vllm import ONE_WAY
from tests.small import write_small_model

FIXED: dict[str, Choice] = {
    **ONE_WAY, "per_device_train_batch_size": 2, "vllm": "server", "sharding": "ddp", "offload": "none",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_small_model(tmp_path_factory.mktemp("model"), weights=False, max_position_embeddings=64))


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.mark.nightly
def test_the_gpus_of_the_server_are_missing_in_the_training_and_its_documents_stay(model: str) -> None:
    # 16 documents cannot be shared out among 3 processes.
    planned = autotune.plan(
        model, seq_len=32, trainer="grpo", gpu="RTX4090", num_processes=4, global_batch_size=16, fix=FIXED
    )
    one, two = planned.servers
    assert (one.generation, one.training) == (1, 3)
    assert one.reason == "16 documents of an optimizer step cannot be shared out among 3 processes"
    assert (two.generation, two.training) == (2, 2)
    assert two.fits, two.reason
    assert two.candidate is not None
    assert two.candidate["vllm"] == "server"
    assert two.training_seconds is not None
    # Each of two processes does what two of four do.
    [whole] = planned.estimates
    assert whole.memory is not None
    assert two.training_bytes == pytest.approx(whole.memory.device_bytes, rel=0.02)
    # TRL's default: 0.9 of each GPU.
    assert two.server_bytes == pytest.approx(0.9 * planned.gpu.memory_bytes, rel=1e-6)
    assert "--tensor-parallel-size 2 --max-model-len 48" in two.serve
    assert two.train.startswith("CUDA_VISIBLE_DEVICES=2,3 trl grpo ")
