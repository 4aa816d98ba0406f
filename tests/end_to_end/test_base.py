"""``autotune probe --base`` from the user's configuration to ``trl sft`` with the recommended one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from autotune.confidential import hidden
from tests.end_to_end.runs import Ended, autotune, by_script, by_trl, train
from tests.end_to_end.test_ranks import ROWS, STEPS, rows_of, stages_of
from tests.step.plans import needs_deepspeed

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(600)]

BASE = """\
# How we train.
model_name_or_path: {model}
datasets:
  - path: json  # our rows
    data_files: {rows}
output_dir: trained
use_cpu: true
learning_rate: 1e-4   # do not touch
max_grad_norm: 0.5
use_peft: true
lora_r: 4             # small
lora_target_modules: [q_proj, v_proj]
per_device_train_batch_size: 1
gradient_accumulation_steps: 4
gradient_checkpointing: true   # saves memory
max_length: null
hub_token: planted0secret1   # ours; before: hub_token=planted0secret2
eos_token: '<|end|>'
env:
  HF_TOKEN: planted0secret3
  WANDB_API_KEY: planted0secret4
  WANDB_PROJECT: ours
model_init_kwargs: {{token: planted0secret5}}
accelerate_config: {accelerate}
"""
# accelerate refuses a key that it does not know, unless it is within one of its own.
ACCELERATE = """\
distributed_type: 'NO'
num_processes: 1
mpirun_config: {aws_secret_access_key: planted0secret6}
tpu_env: [AWS_SECRET_ACCESS_KEY=planted0secret8]
"""
# SQLite passes over what it does not know; elsewhere a password stands there.
STORAGE = "sqlite:///file:study.db?uri=true&password=planted0secret7"
SPACE = """
techniques:
  gradient_checkpointing: ["on", "off"]
  per_device_train_batch_size: [1, 2, 4]
  lora: [none, r16]
  optimizer: [adamw_torch_fused, adamw_torch]
"""


@pytest.fixture(scope="module")
def found(
    tmp_path_factory: pytest.TempPathFactory, small_model_directory: Path, small_dataset_file: Path
) -> tuple[Ended, Path]:
    """One run from a configuration, and its folder."""
    folder = tmp_path_factory.mktemp("base")
    (folder / "accelerate.yaml").write_text(ACCELERATE, encoding="utf-8")
    text = BASE.format(model=small_model_directory, rows=small_dataset_file, accelerate=folder / "accelerate.yaml")
    (folder / "mine.yaml").write_text(text, encoding="utf-8")
    (folder / "space.yaml").write_text(SPACE, encoding="utf-8")
    words = ("--base", "mine.yaml", "--trainer", "sft", "--device", "cpu", "--effort", "quick", "--trials", "4")
    further = ("--space", "space.yaml", "--no-plan", "--json", "--storage", STORAGE)
    return autotune("probe", *words, *further, folder=folder), folder


def test_the_run_starts_from_the_file_and_is_compared_with_it(found: tuple[Ended, Path]) -> None:
    ended, _ = found
    assert ended.code == 0, ended.err
    document = ended.document
    assert document["global_batch_size"] == 4
    assert document["settings"] == {
        "base": "mine.yaml", "trainer": "sft", "device": "cpu", "space": "space.yaml", "effort": "quick", "trials": 4,
        "plan": False, "storage": "sqlite:///file:study.db?uri=true&password=***",
    }  # fmt: skip
    for chosen in (document["recommended"], document["baseline"]):
        assert chosen["plan"]["args"]["max_grad_norm"] == 0.5
        assert chosen["plan"]["model"]["lora_r"] == 4
        assert chosen["documents_per_step"] == 4
    assert document["baseline"]["plan"]["args"]["per_device_train_batch_size"] == 1
    assert "your configuration" in ended.err
    said = " ".join(ended.err.split())
    assert "lora_r: 4, lora_target_modules: ['q_proj', 'v_proj'], use_peft: true, which is not a known choice" in said


def test_the_configuration_is_the_file_with_what_changed(found: tuple[Ended, Path]) -> None:
    ended, folder = found
    before = (folder / "mine.yaml").read_text(encoding="utf-8")
    after = (folder / "autotune-mine" / "config.yaml").read_text(encoding="utf-8")
    body = after[after.index("# How we train.") :]
    assert body in (ended.document["base"]["text"],)
    assert re.findall(r"#.*", body) == list(map(hidden, re.findall(r"#.*", before)))
    keys = [key for key in yaml.safe_load(before) if key != "hub_token"]
    assert list(yaml.safe_load(body))[: len(keys)] == keys
    changed = {line for line in body.splitlines() if line not in before.splitlines()}
    tuned = r"per_device_train_batch_size|gradient_accumulation|gradient_checkpointing|optim"
    # One process, regardless of the user's own file for accelerate.
    started = r"num_processes|  OMP_NUM_THREADS|accelerate_config: .*/accelerate.yaml|mixed_precision: 'no'"
    without_secrets = r"# ours; before: |model_init_kwargs: \{\}"
    assert all(re.match(f"{tuned}|{started}|{without_secrets}", line) for line in changed)
    assert not any("differs from the measured training" in note for note in ended.document["notes"])
    assert ended.document["base"]["diff"].startswith("--- mine.yaml")


def test_trl_trains_by_it(found: tuple[Ended, Path], tmp_path: Path) -> None:
    train(by_trl("sft", found[1] / "autotune-mine" / "config.yaml"), tmp_path)


def test_the_script_trains_too(found: tuple[Ended, Path], tmp_path: Path) -> None:
    train(by_script(found[1] / "autotune-mine" / "train.py"), tmp_path)


def test_a_wrong_base_ends_before_anything_is_probed(tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text("lerning_rate: 1\nmax_seq_length: 5\n", encoding="utf-8")
    ended = autotune("probe", "--base", "wrong.yaml", "--trainer", "sft", "--device", "cpu", folder=tmp_path)
    assert ended.code == 2
    assert "2 things are wrong" in ended.err
    assert "Traceback" not in ended.err
    missing = autotune("probe", "MODEL", folder=tmp_path)
    assert missing.code == 2
    assert "required: DATASET" in missing.err


def test_no_file_and_no_line_of_it_has_a_secret(found: tuple[Ended, Path]) -> None:
    ended, folder = found
    assert ended.code == 0, ended.err
    given = {folder / "mine.yaml", folder / "accelerate.yaml"}
    files = [file for file in folder.rglob("*") if file.is_file() and file not in given]
    written = {
        "result.json",
        "train.py",
        "report.html",
        "config.yaml",
        "reply.json",
        "request.json",
        "log.txt",
        "study.db",
    }
    assert written <= {file.name for file in files}
    assert [file for file in files if b"planted0secret" in file.read_bytes()] == []
    assert "planted0secret" not in ended.out + ended.err
    said = " ".join(ended.err.split())
    assert "set HF_TOKEN, WANDB_API_KEY in the environment" in said
    assert "(secret, not shown)" in ended.document["base"]["diff"]


BASE_OF_RANKS = """\
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
    text = BASE_OF_RANKS.format(
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
    assert not any("differs from the measured training" in note for note in result["notes"])
    bundle = tmp_path / "bundle"
    config = yaml.safe_load((bundle / "config.yaml").read_text())
    assert config["accelerate_config"] == str(bundle / "accelerate.yaml")
    assert config["max_grad_norm"] == 0.5
    if stage is not None:
        zero = json.loads((bundle / "deepspeed.json").read_text())["zero_optimization"]
        assert (zero["stage"], zero["reduce_bucket_size"]) == (stage, 100_000)
    train(by_trl("sft", bundle / "config.yaml"), bundle, "--save_strategy", "steps", "--save_steps", str(STEPS))
    checkpoint = bundle / "trained" / f"checkpoint-{STEPS}"
    assert stages_of(checkpoint) == ({0: stage, 1: stage} if stage is not None else {})
    state = yaml.safe_load((checkpoint / "trainer_state.json").read_text())
    assert state["epoch"] == pytest.approx(STEPS * 8 / ROWS, rel=0.1)
