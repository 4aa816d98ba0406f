"""``autotune probe --base`` from a configuration of two processes to ``trl sft`` by the one that is handed over."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.end_to_end.runs import autotune
from tests.end_to_end.test_ranks import ROWS, rows_of, stages_of
from tests.step.plans import needs_deepspeed

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(600)]

STEPS = 2
BASE = """\
# How we train.
model_name_or_path: {model}
datasets:
  - path: json  # our rows
    data_files: {rows}
output_dir: trained
use_cpu: true
max_grad_norm: 0.5
per_device_train_batch_size: 1
gradient_accumulation_steps: 4
accelerate_config: {accelerate}  # how we start
"""
ZERO2 = {
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "train_micro_batch_size_per_gpu": "auto",
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 100_000},
}
DOCUMENTS: dict[str, dict[str, object]] = {
    "zero2": {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "ds.json"}},
    "ddp": {"distributed_type": "MULTI_GPU"},
}


@pytest.mark.parametrize(
    ("before", "fixed", "stage"),
    [
        pytest.param("zero2", (), 2, marks=needs_deepspeed),
        pytest.param("zero2", ("--fix", "sharding=zero3"), 3, marks=needs_deepspeed),
        ("ddp", (), None),
    ],
    ids=str,
)
def test_a_configuration_of_two_processes_becomes_one_that_trl_starts_unchanged(
    before: str, fixed: tuple[str, ...], stage: int | None, small_model_directory: Path, tmp_path: Path
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(ZERO2), encoding="utf-8")
    document = {**DOCUMENTS[before], "num_processes": 2, "debug": True}
    (tmp_path / "accelerate.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    text = BASE.format(
        model=small_model_directory, rows=rows_of("sft", tmp_path), accelerate=tmp_path / "accelerate.yaml"
    )
    (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
    words = ["--base", "mine.yaml", "--trainer", "sft", "--device", "cpu", "--effort", "quick", "--trials", "1"]
    others = [word for knob in ("sharding", "offload") if not fixed for word in ("--exclude", knob)]
    found = autotune("probe", *words, *fixed, *others, "--no-plan", "--output", "bundle", "--json", folder=tmp_path)
    assert found.code == 0, found.err
    result = found.document
    assert result["global_batch_size"] == 8
    assert result["hardware"]["processes"] == 2
    # The user's own run is measured with its engine, as trial 0.
    assert result["trials"][0]["status"] == "ok", found.err
    log = (tmp_path / "bundle" / "probes" / "0" / "rank-1" / "log.txt").read_text()
    assert ("stage 2 with 2 processes" if before == "zero2" and not fixed else "2 processes") in log
    assert not any("otherwise in config.yaml" in note for note in result["notes"])
    bundle = tmp_path / "bundle"
    config = yaml.safe_load((bundle / "config.yaml").read_text())
    assert config["accelerate_config"] == str(bundle / "accelerate.yaml")
    assert config["max_grad_norm"] == 0.5
    if stage is not None:
        zero = json.loads((bundle / "deepspeed.json").read_text())["zero_optimization"]
        assert (zero["stage"], zero["reduce_bucket_size"]) == (stage, 100_000)
    more = ["--max_steps", str(STEPS), "--save_strategy", "steps", "--save_steps", str(STEPS), "--report_to", "none"]
    trl = Path(sys.executable).with_name("trl")
    done = subprocess.run(
        [str(trl), "sft", "--config", str(bundle / "config.yaml"), *more],
        cwd=bundle, capture_output=True, text=True, timeout=400, check=False, env={**os.environ},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    checkpoint = bundle / "trained" / f"checkpoint-{STEPS}"
    assert stages_of(checkpoint) == ({0: stage, 1: stage} if stage is not None else {})
    state = yaml.safe_load((checkpoint / "trainer_state.json").read_text())
    assert state["epoch"] == pytest.approx(STEPS * 8 / ROWS, rel=0.1)
