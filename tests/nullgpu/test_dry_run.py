"""``autotune dry-run`` of real scripts on null GPUs: measured memory, the last step, and the answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from autotune.units import GIB, MIB
from benchmarks.nullgpu.dry_run import traced
from tests.nullgpu.machine import NEEDS_CUDA_BUILD, ROOT, NullMachine, ended

# On a machine that others use too, a script takes minutes.
pytestmark = [*NEEDS_CUDA_BUILD, pytest.mark.timeout(900)]

EXAMPLES = ROOT / "examples" / "dry_run"
BIN = Path(sys.executable).parent

# The step of examples/dry_run/loop.py at its largest batch, traced without any GPU.
TRACED = """
    import json, torch
    from transformers import AutoModelForCausalLM, LlamaConfig
    from autotune.virtual import phase, trace
    from autotune.virtual.recording.replay import replay
    config = LlamaConfig(vocab_size=8192, hidden_size=512, intermediate_size=1536, num_hidden_layers=4,
                         num_attention_heads=8)
    def training(device):
        model = AutoModelForCausalLM.from_config(config).to(device)
        optimizer = torch.optim.AdamW(model.parameters())
        for number in range(2):
            tokens = torch.ones(4, 1024, dtype=torch.long, device=device)
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    found = replay(trace(training, capability=(9, 0)), capability=(9, 0))
    print(json.dumps(found.peak_allocated_bytes))
"""

# Writes a model of 13M parameters; prints the command of a script, and a configuration that trains alike.
PREPARED = """
    import json, sys
    from pathlib import Path
    from benchmarks.nullgpu.dry_run import Bench, cases
    case = next(case for case in cases() if case.trainer == "grpo")
    print(json.dumps(Bench(Path(sys.argv[1])).words(case)))
"""

GRAPH = """
import torch
x = torch.randn(64, 64, device="cuda")
with torch.cuda.graph(torch.cuda.CUDAGraph()):
    x + 1
"""

# Ends with code 0 though memory ran out once, and saves in a way that a dry run must not get to.
SURVIVOR = """
import sys, torch
from pathlib import Path
model = torch.nn.Linear(1024, 1024, device="cuda")
optimizer = torch.optim.SGD(model.parameters())
for number in range(5):
    try:
        torch.empty(64 << 30, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        pass
    torch.cuda.reset_peak_memory_stats()
    model(torch.ones(4, 1024, device="cuda")).sum().backward()
    optimizer.step()
    Path(sys.argv[1], f"step-{number}").touch()
Path(sys.argv[1], "saved").touch()
"""


@dataclass(frozen=True)
class Ended:
    """What the command line left."""

    code: int
    document: dict[str, Any]
    err: str

    def spans(self, rank: int = 0) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = [
            span for each in self.document["processes"] if each["rank"] == rank for span in each["spans"]
        ]
        return found

    def peak(self, name: str = "allocated_bytes", rank: int = 0) -> int:
        return max(int(span[name]) for span in self.spans(rank))


def dry_run(*words: str | Path, options: Sequence[str] = (), code: int | None = None) -> Ended:
    """Run a command dry on null GPUs of 24 GiB, or as the options have it."""
    gpu = () if "--gpu" in options else ("--gpu", "24GiB")
    given = (*gpu, "--timeout", "10m", *options, "--json", "--", *map(str, words))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "autotune", "dry-run", *given],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert code is None or done.returncode == code, done.stderr[-4000:] + done.stdout
    return Ended(done.returncode, json.loads(done.stdout), done.stderr)


def script(folder: Path, text: str) -> Path:
    file = folder / "script.py"
    file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.nightly
def test_a_plain_loop_takes_what_a_trace_of_its_largest_batch_takes(machine: NullMachine) -> None:
    found = dry_run(sys.executable, EXAMPLES / "loop.py", code=0)
    assert found.document["outcome"] == "fits"
    assert [span["step"] for span in found.spans()] == [0, 1, 2, 3]
    # Where a device is visible, a trace takes a process of its own.
    variables = machine.environment()
    del variables["NULLGPU_DEVICE"]
    with machine.start(TRACED, variables=variables) as process:
        assert found.peak() == pytest.approx(ended(process), rel=0.005)


def test_the_longest_row_is_caught_though_it_is_the_last() -> None:
    words, small = (sys.executable, EXAMPLES / "loop.py"), ("--gpu", "1200MiB")
    found = dry_run(*words, options=small, code=1)
    line = "model(input_ids=tokens, labels=tokens).loss.backward()"
    place = found.document["failed"]["place"]
    assert (Path(place["file"]).name, place["text"]) == ("loop.py", line)
    assert f"loop.py:{place['line']}" in found.document["headline"]
    assert found.document["spare_bytes"] < 0
    as_it_is = dry_run(*words, options=(*small, "--as-shuffled"), code=3)
    assert as_it_is.document["outcome"] == "fits the batches that ran"


@pytest.mark.nightly
def test_a_script_of_transformers_trainer_is_followed_and_not_let_to_save(tmp_path: Path) -> None:
    found = dry_run(sys.executable, EXAMPLES / "trainer.py", tmp_path, options=("--steps", "2"), code=0)
    assert [span["step"] for span in found.spans()] == [0, 1, 2]
    assert found.document["processes"][0]["loaders"][0]["largest"] == 1024
    assert "Traceback" not in found.err
    assert not list(tmp_path.glob("checkpoint-*"))


@pytest.mark.nightly
def test_accelerate_launches_fsdp2_on_two_null_gpus(tmp_path: Path) -> None:
    words = (BIN / "accelerate", "launch", "--config_file", EXAMPLES / "fsdp2.yaml", EXAMPLES / "trainer.py", tmp_path)
    found = dry_run(*words, options=("--steps", "2"), code=0)
    assert found.document["gpus"] == 2
    assert [each["rank"] for each in found.document["processes"]] == [0, 1]
    assert all(each["ended"] == "stopped" for each in found.document["processes"])
    assert len({span["card"] for rank in (0, 1) for span in found.spans(rank)}) == 2
    # Each rank has the largest batch, and half of the weights.
    assert found.peak(rank=0) == pytest.approx(found.peak(rank=1), rel=0.005)
    assert "Traceback" not in found.err


@pytest.mark.nightly
def test_grpo_with_a_reward_function_of_its_own_takes_what_a_trace_of_it_takes(tmp_path: Path) -> None:
    words, configured = NullMachine(tmp_path / "table").run(PREPARED, str(tmp_path))
    found = dry_run(*words, options=("--gpu", "H100-80GB"), code=0)
    assert len(found.spans()) == 4
    assert "the largest of 64 rows" in " ".join(found.document["notes"])
    # Completions of different lengths bring a mask, without which it was 0.84 % less.
    need_bytes = found.peak("reserved_bytes") + found.peak("non_pytorch_bytes")
    assert found.peak() == pytest.approx(traced(configured, need_bytes)["peak_bytes"], rel=0.005)


def test_cuda_graphs_are_refused_by_name(tmp_path: Path) -> None:
    found = dry_run(sys.executable, script(tmp_path, GRAPH), code=3)
    assert found.document["headline"].startswith("not known: the script uses CUDA graphs (cudaStreamBeginCapture)")


def test_a_survived_shortage_is_noted_peaks_outlast_resets_and_nothing_runs_behind_the_last_step(
    tmp_path: Path,
) -> None:
    found = dry_run(sys.executable, script(tmp_path, SURVIVOR), tmp_path, code=3)
    assert found.document["reason"].startswith("no PyTorch DataLoader was used")
    assert any("3 requests for memory failed" in note for note in found.document["notes"])
    # Weights of 4 MiB were there before the script's own reset of the peak.
    assert found.spans()[0]["allocated_bytes"] > 4 * MIB
    assert sorted(each.name for each in tmp_path.glob("s[ta]*")) == ["step-0", "step-1"]


def test_a_script_that_fails_before_it_uses_a_gpu_cannot_run(tmp_path: Path) -> None:
    found = dry_run(sys.executable, script(tmp_path, "import torch\nopen('no-such-file')\n"), code=2)
    assert "FileNotFoundError" in found.document["reason"]
    assert found.document["processes"] == []


@pytest.mark.nightly
@pytest.mark.timeout(2400)
def test_a_70b_checkpoint_is_loaded_in_four_bits_from_a_sparse_file(tmp_path: Path) -> None:
    """131 GiB of weights, on a machine with less memory than that: they are mapped, and hardly read."""
    model = tmp_path / "model"
    write = f"""
        import json
        from pathlib import Path
        from tests.nullgpu.sparse import llama_70b, write_sparse
        print(json.dumps(write_sparse(Path({str(model)!r}), llama_70b())))
    """
    weights = NullMachine(tmp_path / "table").run(write)
    assert weights > 131 * GIB
    words = (sys.executable, ROOT / "tests" / "nullgpu" / "four_bits.py", model, tmp_path / "host.json")
    found = dry_run(*words, options=("--gpu", "H100-80GB", "--steps", "2", "--timeout", "25m"), code=0)
    assert json.loads((tmp_path / "host.json").read_text())["anonymous_bytes"] < 4 * GIB
    # Half a byte for each weight of a linear layer, and a quarter of a byte for 64 of them (the scales are quantised).
    assert weights / 4 < found.peak() < weights / 2
