"""The bundle runs unchanged: by ``trl sft --config``, and by ``python train.py``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from autotune.core.machine import Hardware
from autotune.core.plan import TrainingPlan
from autotune.core.rows.lengths import LengthDistribution
from autotune.core.workload import DatasetProfile, DatasetSource, ModelSource, Workload
from autotune.emit.bundle import write_bundle
from autotune.probing import JobServer
from tests.emit.bundles import recommending
from tests.reporting.examples import a_workload
from tests.settings import WITH_DEEPSPEED, plan_with, setting
from tests.step.plans import needs_deepspeed
from tests.virtual.alone import printed_by

CPU: dict[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
}
NESTED = {"gradient_checkpointing_kwargs": {"every_n_layers": 2}, "model_init_kwargs": {"device_map": None}}
PLAIN = TrainingPlan(
    "sft",
    {**CPU, **NESTED, "packing": False, "max_length": 64},
    {"dtype": "float32"},
    env={"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
)
PACKED_LORA = TrainingPlan(
    "sft",
    {**CPU, "packing": True, "packing_strategy": "bfd", "max_length": 128, "gradient_checkpointing": False},
    {
        "dtype": "float32",
        "attn_implementation": "sdpa",
        "use_peft": True,
        "lora_r": 4,
        "lora_target_modules": "all-linear",
    },
)
PADDING_FREE = TrainingPlan(
    "sft", {**CPU, "packing": False, "padding_free": True, "max_length": None}, {"dtype": "float32"}, truncate_to=48
)


def offloaded(**choices: str) -> TrainingPlan:
    """Return the plan of one process that offloads by DeepSpeed, which is emitted as for a GPU, on this CPU."""
    on_gpu = plan_with(setting(machine=WITH_DEEPSPEED), choices)
    args = {**CPU, "max_length": 64, "deepspeed": on_gpu.args["deepspeed"]}
    return TrainingPlan("sft", args, {"dtype": "float32"})


BY_COMMAND = pytest.mark.parametrize(
    "plan",
    [
        pytest.param(PLAIN, id="plain", marks=pytest.mark.nightly),
        pytest.param(PACKED_LORA, id="packed with LoRA", marks=pytest.mark.nightly),
        pytest.param(PADDING_FREE, id="padding-free and cut", marks=pytest.mark.nightly),
        *(
            pytest.param(
                offloaded(**choices), id=",".join(choices.values()), marks=[pytest.mark.nightly, needs_deepspeed]
            )
            for choices in ({"sharding": "zero2", "offload": "optimizer"}, {"sharding": "zero3", "offload": "both"})
        ),
    ],
)
BY_SCRIPT = pytest.mark.parametrize(
    "plan",
    [
        pytest.param(PLAIN, id="plain", marks=pytest.mark.nightly),
        pytest.param(PACKED_LORA, id="packed with LoRA"),
        pytest.param(PADDING_FREE, id="padding-free and cut", marks=pytest.mark.nightly),
    ],
)


IA3 = TrainingPlan(
    "sft",
    {**CPU, "max_length": 64, "gradient_checkpointing": False},
    {"dtype": "float32", "use_peft": True},
    peft={"peft_type": "IA3", "target_modules": ["k_proj"], "feedforward_modules": []},
)


@pytest.fixture
def small_workload(small_model_directory: Path, small_dataset_file: Path, tmp_path: Path) -> Workload:
    """The small model and the small dataset, tokenised as a run keeps them."""
    from datasets import Dataset
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(small_model_directory)
    texts = [json.loads(line)["text"] for line in small_dataset_file.read_text().splitlines()]
    ids = [tokenizer(text + tokenizer.eos_token)["input_ids"] for text in texts]
    Dataset.from_dict({"input_ids": ids, "labels": ids}).save_to_disk(tmp_path / "tokenized")
    lengths = Counter(len(row) for row in ids)
    dataset = DatasetProfile(
        name=small_dataset_file.name,
        format="text",
        columns=("text",),
        lengths=LengthDistribution(lengths),
        trainable_tokens=sum(len(row) for row in ids),
        tokenized_directory=str(tmp_path / "tokenized"),
        fingerprint="d",
    )
    return a_workload(
        model_source=ModelSource(str(small_model_directory)),
        dataset_source=DatasetSource(small_dataset_file.name, "json", str(small_dataset_file)),
        dataset=dataset,
    )


@pytest.fixture
def bundle(small_workload: Workload, plan: TrainingPlan, tmp_path: Path) -> Path:
    """The bundle of a run that recommends the plan, on this machine's CPU."""
    hardware = Hardware(kind="cpu", name="CPU", memory_bytes=2**33, cores=len(os.sched_getaffinity(0)))
    write_bundle(recommending(plan, workload=small_workload, hardware=hardware), tmp_path / "bundle")
    return tmp_path / "bundle"


def run(command: list[str], directory: Path) -> None:
    """Run a command in a separate directory, and show its output if it fails."""
    done = subprocess.run(command, check=False, cwd=directory, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def run_script(server: JobServer, bundle: Path, directory: Path) -> None:
    """Run the script of a bundle in another directory, in a process that has the libraries imported."""
    words = [str(bundle / "train.py"), "--max_steps", "1", "--output_dir", "elsewhere"]
    start = f"import os, runpy, sys; os.chdir({str(directory)!r}); sys.argv = {words}"
    printed_by(server, f"{start}; runpy.run_path(sys.argv[0], run_name='__main__')")


@pytest.mark.slow
@BY_COMMAND
def test_trl_runs_the_config_and_saves_the_model(bundle: Path, tmp_path: Path) -> None:
    trl = Path(sys.executable).with_name("trl")
    run([str(trl), "sft", "--config", str(bundle / "config.yaml"), "--max_steps", "1"], tmp_path)
    assert list(tmp_path.glob("*-sft/*.safetensors"))


@pytest.mark.slow
@BY_SCRIPT
def test_the_script_runs_where_it_was_moved_and_takes_overrides(
    job_server: JobServer, bundle: Path, tmp_path: Path
) -> None:
    run_script(job_server, bundle.rename(tmp_path / "moved"), tmp_path)
    assert list((tmp_path / "elsewhere").glob("*.safetensors"))


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("plan", [IA3], ids=["IA3"])
def test_the_script_trains_what_the_peft_configuration_beside_it_says(
    job_server: JobServer, bundle: Path, tmp_path: Path
) -> None:
    run_script(job_server, bundle.rename(tmp_path / "moved"), tmp_path)
    assert json.loads((tmp_path / "elsewhere" / "adapter_config.json").read_text())["peft_type"] == "IA3"
