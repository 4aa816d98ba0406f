"""Every trainer from the command line to two training steps, with its whole search space and too little memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from autotune.trainers import find_trainer, trainers
from tests.end_to_end.runs import autotune
from tests.small import write_rows, write_small_model
from tests.trainers.samples import sample_rows

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

PROBES = 8
# Of what TRL's default needs, which then runs out of memory: 5 % of it are the margin. For KTO, a precomputed reference
# needs 74 to 81 % of it, from run to run, and little else needs less.
SHARE = 0.92
# Completions as long as those of a real run would take minutes on a CPU.
BRIEF: Mapping[str, tuple[str, ...]] = {
    "grpo": ("max_completion_length=24", "num_generations=4"),
    "rloo": ("max_completion_length=24", "num_generations=4"),
    "online_dpo": ("max_new_tokens=24",),
    "distillation": ("max_completion_length=24",),
}


@dataclass(frozen=True)
class Found:
    """A search that ended.

    Attributes:
        document: what it wrote as JSON.
        folder: where its bundle is.
    """

    trainer: str
    document: Mapping[str, Any]
    folder: Path


@pytest.fixture(scope="module", params=list(trainers()))
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    name, folder = str(request.param), tmp_path_factory.mktemp("found")
    model = write_small_model(folder / "model", hidden_size=256, intermediate_size=1024, num_hidden_layers=4)
    write_rows(folder / "rows.jsonl", sample_rows(name, find_trainer(name).formats[-1].name))
    teacher = ("--teacher", "model") if find_trainer(name).has_teacher else ()
    fixes = [word for fix in BRIEF.get(name, ()) for word in ("--fix", fix)]
    words: tuple[str | Path, ...] = (
        "probe",
        model,
        "rows.jsonl",
        "--trainer",
        name,
        "--device",
        "cpu",
        "--effort",
        "quick",
        *teacher,
        *fixes,
        "--json",
    )
    default = autotune(*words, "--no-plan", "--trials", "1", "--output", "default", folder=folder, timeout=600)
    assert default.code == 0, default.err
    peak_bytes = default.document["trials"][0]["peak_bytes"]
    budget = ("--memory-budget", f"{int(SHARE * peak_bytes) >> 20}MiB")
    ended = autotune(*words, *budget, "--trials", str(PROBES), "--output", "bundle", folder=folder, timeout=600)
    assert ended.code == 0, ended.err
    return Found(name, ended.document, folder)


def test_a_recommendation_is_confirmed_where_the_default_runs_out_of_memory(found: Found) -> None:
    document = found.document
    assert (document["status"], document["trainer"], document["confirmed"]) == ("found", found.trainer, True)
    ended = [trial["status"] for trial in document["trials"]]
    # Half of them are kept for what each choice brings, and of those the ones that cannot fit are not probed.
    assert len(ended) > PROBES // 2
    assert "out_of_memory" in ended
    assert "ok" in ended


def test_its_bundle_trains_for_two_steps_unchanged(found: Found) -> None:
    brief = ["--max_steps", "2", "--report_to", "none", "--save_strategy", "no"]
    ways = [[sys.executable, "bundle/train.py"]]
    if find_trainer(found.trainer).has_command:
        ways.append([str(Path(sys.executable).with_name("trl")), found.trainer, "--config", "bundle/config.yaml"])
    for words in ways:
        done = subprocess.run(
            [*words, *brief], cwd=found.folder, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
