"""Plans with vLLM: on the training's GPU, and in a server on separate GPUs (``--server-gpus``)."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import autotune
from autotune.app.arguments import SearchArguments
from autotune.app.options import checked_options
from autotune.app.planned import planned_machine
from autotune.app.problem import problem_of
from autotune.app.servers import check_server, reserve_server_gpus, split_of
from autotune.core.candidate import Choice
from autotune.core.documents.bundle import ServerSplit
from autotune.core.documents.estimate import Origin
from autotune.core.documents.verdict import Outcome
from autotune.core.rows.lengths import LengthDistribution
from autotune.errors import InputError
from tests.settings import workload
from tests.small import write_rows

ONE_WAY: dict[str, Choice] = {
    "attention": "sdpa", "gradient_checkpointing": "off", "liger": "off", "optimizer": "adamw_torch",
    "pad_to_multiple_of": "none", "precision": "float32", "per_device_train_batch_size": 8,
    "steps_per_generation": "step", "max_completion_length": 16, "beta": "0.0", "num_iterations": 1,
    "num_generations": 8, "hub_kernels": "off", "allocator": "default",
}  # fmt: skip


@pytest.mark.slow
def test_candidates_with_vllm_have_memory_and_no_time(model: str) -> None:
    fix = {**ONE_WAY, "vllm": "colocate-sleep", "vllm_gpu_memory_utilization": "0.5"}
    found = autotune.plan(model, seq_len=32, trainer="grpo", gpu="RTX4090", fix=fix)
    [estimate] = found.estimates
    assert estimate.origin is Origin.TRACED
    assert estimate.memory is not None
    assert estimate.tokens_per_second is None
    assert estimate.memory.breakdown["vLLM"] == -(-found.gpu.memory_bytes // 2)
    assert sum(estimate.memory.breakdown.values()) == estimate.memory.device_bytes
    assert any("The speed of vLLM's generation cannot be traced" in note for note in found.notes)
    assert any("asleep, it still holds 1.00 GiB" in note for note in found.notes)


@pytest.mark.slow
def test_a_share_that_vllm_does_not_start_with_is_told_with_the_reason(model: str) -> None:
    fix = {**ONE_WAY, "vllm": "colocate", "vllm_gpu_memory_utilization": "0.05"}
    found = autotune.plan(model, seq_len=32, trainer="grpo", gpu="24GiB", fix=fix)
    assert found.fastest is None
    assert "vLLM does not start with 0.05 of the GPU" in found.estimates[0].reason


FIXED: dict[str, Choice] = {
    **ONE_WAY, "per_device_train_batch_size": 2, "vllm": "server", "sharding": "ddp", "offload": "none",
}  # fmt: skip
pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.nightly
def test_the_training_has_the_other_gpus_and_a_check_judges_these(model: str, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "the speed of a token"}] * 16)
    words = {"trainer": "grpo", "gpu": "RTX4090", "num_processes": 4, "global_batch_size": 16, "fix": FIXED}
    folder = tmp_path / "bundle"
    planned = autotune.plan(model, str(rows), server_gpus=2, output=folder, **words)  # type: ignore[arg-type]
    bundle, best = planned.bundle, planned.best
    assert bundle is not None
    assert bundle.server is not None
    assert best is not None
    assert best.memory is not None
    assert (planned.processes, bundle.processes, planned.global_batch_size) == (2, 2, 16)
    assert (bundle.needed_bytes, bundle.candidate) == (best.memory.device_bytes, best.candidate)
    assert (bundle.server.generation, bundle.server.training) == (2, 2)
    assert bundle.server.training_seconds is not None
    # TRL's default: 0.9 of each GPU.
    assert bundle.server.server_bytes == pytest.approx(0.9 * planned.gpu.memory_bytes, rel=1e-6)
    assert "--tensor-parallel-size 2 --max-model-len " in bundle.server.serve
    assert bundle.server.serve in (folder / "serve.sh").read_text(encoding="utf-8")
    assert any("2 further GPUs generate in a vLLM server" in note for note in planned.notes)
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    assert (config["num_processes"], config["use_vllm"], config["vllm_mode"]) == (2, True, "server")

    # The bundle names its trainer, since its keys belong to several.
    verdict = autotune.check(folder / "config.yaml", gpu="RTX4090")
    assert (verdict.outcome, verdict.trainer, verdict.processes) == (Outcome.FITS, "grpo", 2)
    assert verdict.documents_per_step == 16
    assert verdict.need is not None
    assert verdict.need.bytes == pytest.approx(bundle.needed_bytes, rel=0.01)
    said = " ".join(finding.message for finding in verdict.findings)
    assert "A vLLM server on other GPUs generates the completions" in said
    assert "has not measured it" in said


@pytest.mark.parametrize(
    ("server_gpus", "changes", "said"),
    [
        (3, {}, r"A server on 3 of 4 GPUs is not possible\. It takes 1, 2\."),
        (1, {"num_processes": 1}, r"Of a single GPU, none can be a server's\."),
        (1, {"num_machines": 2}, r"A vLLM server needs GPUs of one machine, and 4 GPUs are in 2\."),
        (1, {"global_batch_size": 16}, r"A global batch of 16 completions cannot be reached with 3 processes\."),
        (1, {"gpu": "cpu"}, r"No vLLM server can generate here: TRL's vLLM needs a CUDA GPU\."),
        (1, {"fix": {"vllm": "colocate"}}, r"and this plan has no server\."),
        (1, {"fix": {}}, r"and this plan has no server\."),
        (1, {"fix": {}, "trainer": "sft"}, r"and this plan has no server\."),
    ],
)
def test_a_server_that_cannot_be_is_refused_before_anything_is_started(
    server_gpus: int, changes: dict[str, Any], said: str, model: str
) -> None:
    words = {"trainer": "grpo", "gpu": "RTX4090", "num_processes": 4, "fix": {"vllm": "server"}, **changes}
    with pytest.raises(InputError) as raised:
        autotune.plan(model, seq_len=8, server_gpus=server_gpus, **words)
    assert re.search(said, f"{raised.value.message} {raised.value.hint}")


def test_an_allowed_server_generates_and_one_that_does_not_start_is_refused() -> None:
    options = checked_options(SearchArguments(trainer="grpo", allow=("vllm",)))
    planned, served = reserve_server_gpus(planned_machine("RTX4090", 2), options, 1)
    assert planned.hardware.processes == 1
    assert served.fixed == {"vllm": "server"}
    of = workload(trainer="grpo", max_positions=4096)
    problem = problem_of(served, of, planned, 8)
    start = problem.baseline
    assert isinstance(split_of(problem, start, 1), ServerSplit)
    # 2,000 tokens of the longest prompt and 512 of a completion are too many for this model.
    few = split_of(problem_of(served, workload(trainer="grpo", max_positions=2048), planned, 8), start, 1)
    assert few == "vLLM refuses sequences of 2,512 tokens of a model that was made for 2,048"
    large = workload(trainer="grpo", max_positions=4096, parameters=20_000_000_000)
    with pytest.raises(
        InputError, match=r"A server on 1 of the GPUs is not possible: vLLM does not start with 0\.9 of the GPU"
    ):
        check_server(problem_of(served, large, planned, 8), 1)


@pytest.mark.parametrize(
    ("trainer", "evaluated", "tokens"), [("grpo", 0, 2512), ("grpo", 3000, 3512), ("online_dpo", 0, 2065)]
)
def test_a_server_takes_the_longest_prompt_of_all_with_what_it_adds(trainer: str, evaluated: int, tokens: int) -> None:
    """vLLM adds a token to text, which TRL's online DPO sends."""
    options = checked_options(SearchArguments(trainer=trainer, allow=("vllm",)))
    planned, served = reserve_server_gpus(planned_machine("RTX4090", 2), options, 1)
    of = workload(trainer=trainer, max_positions=4096)
    longer = replace(of.dataset, lengths=LengthDistribution({evaluated: 8})) if evaluated else None
    problem = problem_of(served, replace(of, evaluation=longer), planned, 8)
    found = split_of(problem, problem.baseline, 1)
    assert isinstance(found, ServerSplit)
    assert f"--max-model-len {tokens} " in found.serve
