"""``autotune probe`` and ``plan`` on a null GPU, and TRL with their bundles: every trainer."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from autotune.nullgpu.devices import null_device
from autotune.trainers import find_trainer, trainers
from tests.nullgpu.machine import NEEDS_CUDA_BUILD, NullMachine
from tests.small import WORDS, write_rows
from tests.trainers.samples import SAMPLES

pytestmark = [*NEEDS_CUDA_BUILD, pytest.mark.nightly, pytest.mark.slow, pytest.mark.timeout(1800)]

GPU = "A100-40GB"
SPACE = """
trainer: {trainer}
techniques:
  gradient_checkpointing: ["on", "off"]
recipes:
  - {{gradient_checkpointing: "off"}}
"""
BRIEF: Mapping[str, str] = {
    "grpo": "max_completion_length=12",
    "rloo": "max_completion_length=12",
    "online_dpo": "max_new_tokens=12",
    "distillation": "max_completion_length=12",
}
# Rows of equal lengths: a plan takes all rows of the worst micro-batch for as long as the longest.
TEXTS = [" ".join(WORDS)] * 5 + [" ".join(reversed(WORDS))] * 5
FORMATS: Mapping[str, str] = {
    "sft": "text", "dpo": "chosen+rejected", "kto": "chosen+rejected", "reward": "chosen+rejected"
}  # fmt: skip
MODEL = """
    import sys
    from pathlib import Path
    from tests.small import write_small_model
    write_small_model(Path(sys.argv[1]))
"""


@dataclass(frozen=True)
class Found:
    """A search that ended.

    Attributes:
        document: what it wrote as JSON.
        words: model, rows and options, which a plan takes too.
    """

    machine: NullMachine
    folder: Path
    trainer: str
    document: Mapping[str, Any]
    words: tuple[str, ...]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    ran(NullMachine(folder / "table"), folder, sys.executable, "-c", dedent(MODEL), str(folder / "model"))
    return folder / "model"


@pytest.fixture(scope="module", params=list(trainers()))
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path) -> Found:
    name, folder = str(request.param), tmp_path_factory.mktemp("found")
    write_rows(folder / "rows.jsonl", SAMPLES[name][FORMATS.get(name, "prompt")](TEXTS))
    (folder / "space.yaml").write_text(SPACE.format(trainer=name), encoding="utf-8")
    machine = NullMachine(folder / "table")
    fixed: tuple[str, ...] = ("--fix", BRIEF[name]) if name in BRIEF else ()
    fixed += ("--teacher", str(model)) if find_trainer(name).has_teacher else ()
    words = (str(model), "rows.jsonl", "--trainer", name, "--space", "space.yaml", *fixed, "--json")
    # Runs that take turns are the same for every trainer.
    searched = ("--effort", "quick", "--trials", "2" if name == "sft" else "1", "--no-plan", "--output", "bundle")
    out = ran(machine, folder, sys.executable, "-m", "tests.brief", "probe", *words, *searched)
    return Found(machine, folder, name, json.loads(out), words)


def ran(machine: NullMachine, folder: Path, *words: str) -> str:
    """Return what a command prints in a folder of a machine with one GPU."""
    environment = machine.environment(GPU)
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_a_search_ends_with_a_bundle_that_trl_trains_with(found: Found) -> None:
    document = found.document
    assert (document["status"], document["confirmed"]) == ("found", True)
    assert document["hardware"]["name"] == null_device(GPU).name
    assert any("Measured on a null GPU" in note for note in document["notes"])
    words = [sys.executable, "bundle/train.py"]
    # The script for one trainer, the command for the others that have one.
    if find_trainer(found.trainer).has_command and found.trainer != "sft":
        words = [str(Path(sys.executable).with_name("trl")), found.trainer, "--config", "bundle/config.yaml"]
    ran(found.machine, found.folder, *words, "--max_steps", "1", "--report_to", "none", "--save_strategy", "no")


def test_a_plan_for_that_gpu_is_as_near_to_what_was_measured_as_it_states(found: Found) -> None:
    planned = json.loads(ran(found.machine, found.folder, sys.executable, "-m", "autotune", "plan", *found.words))
    assert planned["gpu"]["name"] == GPU
    estimated = {json.dumps(one["candidate"]): one["memory"] for one in planned["estimates"]}
    for trial in found.document["trials"]:
        memory = estimated[json.dumps(trial["candidate"])]
        assert memory["peak_bytes"] == pytest.approx(trial["peak_bytes"], rel=memory["error"])
