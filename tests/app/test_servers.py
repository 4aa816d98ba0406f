"""``autotune.plan`` splits several GPUs between a vLLM server and the training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import autotune
from autotune.core.candidate import Choice
from autotune.core.verdict import Outcome
from autotune.errors import InputError
from tests.app.test_plan_vllm import ONE_WAY
from tests.small import write_rows, write_small_model

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
    whole = planned.best
    assert whole is not None
    assert whole.memory is not None
    assert two.training_bytes == pytest.approx(whole.memory.device_bytes, rel=0.02)
    # TRL's default: 0.9 of each GPU.
    assert two.server_bytes == pytest.approx(0.9 * planned.gpu.memory_bytes, rel=1e-6)
    assert "--tensor-parallel-size 2 --max-model-len 48" in two.serve
    assert two.train.startswith("CUDA_VISIBLE_DEVICES=2,3 trl grpo ")


@pytest.mark.nightly
def test_the_split_that_is_asked_for_is_written_and_a_check_judges_the_gpus_that_train(
    model: str, tmp_path: Path
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "the speed of a token"}] * 16)
    words = {"trainer": "grpo", "gpu": "RTX4090", "num_processes": 4, "global_batch_size": 16, "fix": FIXED}
    folder = tmp_path / "bundle"
    planned = autotune.plan(model, str(rows), server_gpus=2, output=folder, **words)  # type: ignore[arg-type]
    [split] = planned.servers
    bundle = planned.bundle
    assert bundle is not None
    assert bundle.server == split
    assert (bundle.processes, bundle.needed_bytes) == (2, split.training_bytes)
    assert split.serve in (folder / "serve.sh").read_text(encoding="utf-8")
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    assert (config["num_processes"], config["use_vllm"], config["vllm_mode"]) == (2, True, "server")

    # The bundle says which trainer it is for, where its keys are those of several.
    verdict = autotune.check(folder / "config.yaml", gpu="RTX4090")
    assert (verdict.outcome, verdict.trainer, verdict.processes) == (Outcome.FITS, "grpo", 2)
    assert verdict.documents_per_step == 16
    assert verdict.need is not None
    assert verdict.need.bytes == pytest.approx(split.training_bytes, rel=0.01)
    said = " ".join(finding.message for finding in verdict.findings)
    assert "A vLLM server on other GPUs generates the completions" in said
    assert "has not measured it" in said

    # One of the four processes is missing, and 16 documents cannot be shared out among three.
    nothing = autotune.plan(model, str(rows), server_gpus=1, output=folder, **words)  # type: ignore[arg-type]
    assert nothing.bundle is None
    assert "16 documents of an optimizer step cannot be shared out among 3 processes" in nothing.unwritten
    assert list(folder.iterdir()) == []
    with pytest.raises(InputError, match=r"A server on 3 of 4 GPUs is not possible") as raised:
        autotune.plan(model, str(rows), server_gpus=3, output=folder, **words)  # type: ignore[arg-type]
    assert raised.value.hint == "It takes 1, 2."
    with pytest.raises(InputError, match=r"A bundle with a vLLM server is for one machine, and 4 GPUs are in 2\."):
        autotune.plan(model, str(rows), num_machines=2, output=folder, **words)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="and there is none"):
        autotune.plan(model, seq_len=8, gpu="RTX4090", num_processes=2, server_gpus=1)
