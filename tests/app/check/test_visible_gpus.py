"""The processes of a command are compared with the GPUs that ``CUDA_VISIBLE_DEVICES`` leaves visible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autotune.app.arguments import CheckArguments
from autotune.app.check.check import _device_per_process
from autotune.app.planned import planned_machine
from autotune.core.configuration import Configuration, ReadCommand
from autotune.core.documents.verdict import Severity
from autotune.core.machine import Hardware
from autotune.core.plan import Launch
from autotune.errors import AutotuneError, InputError, UnreadError
from autotune.inspection import machine as of_machine
from autotune.inspection.command_line import read_command_line
from autotune.inspection.cuda import NoGpuError
from autotune.inspection.yaml_file import parse_yaml
from autotune.userconfig.launch import launching, visible_gpu_count
from autotune.userconfig.launch_problems import launch_findings
from autotune.userconfig.launchers import named_gpus
from autotune.userconfig.written import WrittenConfig
from tests.app.check.starting import read_by_accelerate, started, with_keys
from tests.settings import GPU


def test_without_a_number_accelerate_starts_a_process_on_each_gpu_of_this_machine(script: str) -> None:
    command = read_command_line(["accelerate", "launch", script, "--config", "c.yaml"])
    written = WrittenConfig(command, None, "sft")
    read = read_by_accelerate(written, gpus=8)
    found = launching(written, read, 8)
    assert (found.processes, found.sets_processes) == (8, False)
    assert any("one on each of 8 GPUs" in item.message for item in launch_findings(written, read, found))
    hidden = WrittenConfig(read_command_line(["CUDA_VISIBLE_DEVICES=0", "trl", "sft"]), None, "sft")
    assert (visible_gpu_count(written, 8), visible_gpu_count(hidden, 8)) == (8, 1)
    assert started("deepspeed", script, gpus=8).processes == 8


@pytest.mark.parametrize(
    "value", ["0", "4,5,6,7", " 1, 2 ", "", "-1", "0,-1,1", "0,0", "0 1", "[0, 1]", "GPU-a1,GPU-b2", "MIG-a1", "none"]
)
def test_gpus_of_the_variable_are_counted_as_torch_counts_them(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert named_gpus(value) == len(torch.cuda._parse_visible_devices())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("CUDA_VISIBLE_DEVICES=0,1,2,3 accelerate launch --num_processes 8", r"names 4 GPUs\. Write --num_processes 4"),
        ("CUDA_VISIBLE_DEVICES=0 torchrun --nproc_per_node 2 --nnodes 2", r"names 1 GPU\. Write --nproc_per_node 1"),
        (
            "CUDA_VISIBLE_DEVICES= torchrun",
            r"1 process on each .* names 0 GPUs\. Name GPUs in CUDA_VISIBLE_DEVICES, or write use_cpu",
        ),
        ("accelerate launch --multi_gpu --num_processes 4 --gpu_ids 0,1", "and gpu_ids names 2 GPUs"),
    ],
)
def test_more_processes_than_visible_gpus_cannot_train(words: str, said: str, script: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        started(words, script)
    assert not isinstance(caught.value, UnreadError)


def test_a_file_hides_gpus_from_the_processes_of_every_launcher(script: str) -> None:
    env = {"CUDA_VISIBLE_DEVICES": "0"}
    for words in (f"torchrun --nproc_per_node 2 {script}", f"deepspeed --num_gpus 2 {script}"):
        with pytest.raises(InputError, match="2 processes on each machine, and CUDA_VISIBLE_DEVICES names 1 GPU"):
            launching(*with_keys(words, env=env))
    written, read = with_keys("trl sft", num_processes=2)
    assert written.file is not None
    file = parse_yaml(f"{written.file.text}env: {{CUDA_VISIBLE_DEVICES: 0}}\n", Path("c.yaml"))
    with pytest.raises(InputError, match=r"names 1 GPU\. Write num_processes: 1"):
        launching(replace(written, file=file), read)


@pytest.mark.parametrize(
    "words",
    [
        "CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node 2",
        "CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node 2 --nnodes 4",
        "CUDA_VISIBLE_DEVICES=7 accelerate launch --multi_gpu --num_processes 2 --gpu_ids 0,1",
        "CUDA_VISIBLE_DEVICES= accelerate launch --cpu",
        # DeepSpeed ignores the variable beside --num_gpus (runner.py, "Detected VISIBLE_DEVICES").
        "CUDA_VISIBLE_DEVICES=0 deepspeed --num_gpus 8",
    ],
)
def test_as_many_processes_as_visible_gpus_train(words: str, script: str) -> None:
    assert started(words, script).processes >= 1


@pytest.mark.parametrize(
    ("words", "gpus", "seen"),
    [
        ("python", 4, 4),
        ("python", 1, None),
        ("python", None, None),
        ("CUDA_VISIBLE_DEVICES=0,1 python", None, 2),
        ("CUDA_VISIBLE_DEVICES=0 python", 4, None),
        ("accelerate launch --num_processes 1", 4, 4),
        ("accelerate launch --num_processes 1 --gpu_ids 2", 4, None),
        ("accelerate launch --num_processes 1 --use_fsdp", 4, None),
        # These give their processes ranks, and TRL loads no model over several devices then.
        ("torchrun --nproc_per_node 1", 4, None),
        ("deepspeed --num_gpus 1", 4, None),
    ],
)
def test_a_model_that_one_process_spreads_over_its_gpus_is_not_known(
    words: str, gpus: int | None, seen: int | None, script: str
) -> None:
    if seen is None:
        assert started(words, script, gpus).processes == 1
    else:
        with pytest.raises(UnreadError, match=f"One process sees {seen} GPUs"):
            started(words, script, gpus)


def test_processes_on_a_cpu_need_no_gpu(script: str) -> None:
    written, _ = with_keys(f"CUDA_VISIBLE_DEVICES= torchrun --nproc_per_node 2 {script}")
    read = ReadCommand({"SFTConfig": Configuration("SFTConfig", {"use_cpu": True}, {})})
    assert launching(written, read).processes == 2


@pytest.mark.parametrize(
    ("words", "processes"),
    [
        ("CUDA_VISIBLE_DEVICES=4,5,6,7 accelerate launch", 4),
        ("CUDA_VISIBLE_DEVICES=4 accelerate launch", 1),
        ("CUDA_VISIBLE_DEVICES=4,5,6,7 torchrun --nproc_per_node gpu", 4),
        ("CUDA_VISIBLE_DEVICES=4,5,6,7 deepspeed", 4),
    ],
)
def test_a_launcher_starts_a_process_on_each_visible_gpu(words: str, processes: int, script: str) -> None:
    command = read_command_line([*words.split(), script, "--config", "c.yaml"])
    written = WrittenConfig(command, None, "sft")
    read = read_by_accelerate(written, gpus=visible_gpu_count(written, None) or 1)
    found = launching(written, read)
    assert (found.processes, launching(written, read, 8).processes) == (processes, processes)
    assert not any("one is assumed" in item.message for item in launch_findings(written, read, found))


@pytest.mark.parametrize(
    ("words", "keys", "free"),
    [
        ("accelerate launch --num_processes 2 FILE", "", 70),
        ("accelerate launch --num_processes 2 --gpu_ids 0,3 FILE", "", 9),
        ("CUDA_VISIBLE_DEVICES=2,0 accelerate launch --num_processes 2 FILE", "", 75),
        ("CUDA_VISIBLE_DEVICES=3 accelerate launch --num_processes 2 --gpu_ids 0,2 FILE", "", 75),
        ("deepspeed --include localhost:2,0 FILE", "", 75),
        ("CUDA_VISIBLE_DEVICES=1,2 torchrun --nproc_per_node 2 FILE", "", 70),
        ("trl sft --config FILE", "env: {CUDA_VISIBLE_DEVICES: '2,0'}\n", 75),
        ("trl sft --config FILE", "gpu_ids: 0,2\n", 75),
        ("trl sft --config FILE", "", 70),
        ("CUDA_VISIBLE_DEVICES=4,5 accelerate launch --num_processes 2 FILE", "", None),
    ],
)
def test_only_gpus_that_train_decide_how_much_is_free(
    words: str, keys: str, free: int | None, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_each = [replace(GPU.hardware, memory_bytes=79, used_by_others_bytes=used) for used in (0, 9, 4, 70)]

    def visible_gpus(named: str | None) -> Sequence[Hardware]:
        found = of_each if named is None else [of_each[int(word)] for word in named.split(",") if int(word) < 4]
        if not found:
            raise NoGpuError("no device")
        return found

    monkeypatch.setattr(of_machine, "visible_gpus", visible_gpus)
    monkeypatch.setattr(of_machine, "torch_cuda_version", lambda: "13.0")
    text = WrittenConfig(
        read_command_line(words.replace("FILE", script).split()),
        parse_yaml(keys or "bf16: true\n", Path("c.yaml")),
        "sft",
    )
    asked, here = CheckArguments(None), planned_machine(None)
    if free is None:
        with pytest.raises(AutotuneError, match="no GPU here: no device"):
            _device_per_process(asked, text, here, Launch(2))
        return
    found = _device_per_process(asked, text, here, Launch(2)).hardware
    assert (found.processes, found.available_bytes) == (2, free)
    first = _device_per_process(replace(asked, probe=True), text, here, Launch(2))
    assert first.hardware.available_bytes == 70


@pytest.mark.parametrize("words", ["accelerate launch", "deepspeed"])
def test_a_number_of_processes_that_is_not_named_is_reported(words: str, script: str) -> None:
    written, read = with_keys(f"{words} {script}")
    [note] = launch_findings(written, read, launching(written, read))
    assert note.severity is Severity.NOTE
    assert "Nothing sets the number of processes" in note.message
    assert "one is assumed" in note.message
    # These start one process if no number is named.
    for definite in ("torchrun", "python"):
        written, read = with_keys(f"{definite} {script}")
        assert not list(launch_findings(written, read, launching(written, read)))
