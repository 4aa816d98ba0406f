"""Fields of TRL's configurations: techniques write existing ones, and each process reads a command alike."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from autotune.core.configuration import ReadCommand
from autotune.core.jobs.protocol import ReadCommandRequest
from autotune.step.fields import mismatch, same
from autotune.step.job import JobContext
from autotune.step.jobs.prepare import absent_entries
from autotune.step.jobs.read_command import read_command
from autotune.step.trainers import adapters, find_adapter


@pytest.mark.parametrize("name", adapters())
def test_the_installed_trl_has_every_field(name: str) -> None:
    assert absent_entries(find_adapter(name)) == ()


def test_a_field_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class Later:
        """A configuration of a later TRL, with a single field."""

        packing: bool = False

    known = find_adapter("sft")
    monkeypatch.setattr(known, "config", Later)
    found = absent_entries(known)
    assert "args.packing" not in found
    assert {"args.max_length", "args.use_liger_kernel", "args.model_init_kwargs.use_kernels"} <= set(found)
    assert not any(entry.startswith(("model.", "env.", "peft")) for entry in found)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1.5])
def test_a_number_that_is_not_whole_is_no_whole_number(value: float) -> None:
    assert mismatch(int, value) == "a whole number"
    assert not mismatch(float, value)
    assert not mismatch(int, 2.0)


GROUPS = ("--use_cpu", "true", "--per_device_train_batch_size", "2", "--num_generations", "8")


def read(trainer: str, processes: int, folder: Path, *words: str) -> ReadCommand:
    request = ReadCommandRequest(trainer, (*GROUPS, *words), {}, "cpu", processes=processes)
    return read_command(request, JobContext(folder, time.monotonic()))


@pytest.mark.parametrize(("trainer", "kind"), [("grpo", "GRPOConfig"), ("rloo", "RLOOConfig")])
def test_sizes_of_all_processes_are_shared_out_among_them(trainer: str, kind: str, tmp_path: Path) -> None:
    assert "divisible" in read(trainer, 1, tmp_path).refused
    assert read(trainer, 8, tmp_path).configurations[kind].values["generation_batch_size"] == 16
    whole = ("--generation_batch_size", "64")
    parts = {count: read(trainer, count, tmp_path, *whole).configurations[kind].values for count in (1, 8)}
    assert {count: values["steps_per_generation"] for count, values in parts.items()} == {1: 32, 8: 4}
    assert "divisible by the global batch size" in read(trainer, 8, tmp_path, "--generation_batch_size", "24").refused


def test_a_size_that_trl_divides_by_is_refused_with_the_name_of_the_error(tmp_path: Path) -> None:
    assert read("grpo", 1, tmp_path, "--num_generations", "0").refused.startswith("ZeroDivisionError: ")


@pytest.mark.parametrize(
    ("asked", "used", "is_same"),
    [
        ({"fsdp_wrapped": "Layer"}, {"wrapped": ["Layer"], "min_num_params": 0}, True),
        ({"fsdp_wrapped": "Layer"}, {"wrapped": ["Other"]}, False),
        ({"wrapped": True}, {"min_num_params": 0}, False),
    ],
)
def test_keys_of_fsdp_have_two_spellings(asked: object, used: object, is_same: bool) -> None:
    assert same(asked, used) is is_same


def test_a_mapping_may_be_given_as_json_or_by_the_name_of_its_file(tmp_path: Path) -> None:
    text, file = '{"dispatch_batches": true}', tmp_path / "own.json"
    file.write_text(text, encoding="utf-8")
    for asked in (text, str(file)):
        assert same(asked, {"dispatch_batches": True, "even_batches": True})
        assert not same(asked, {"dispatch_batches": False})
    assert not same(str(tmp_path / "absent.json"), {"dispatch_batches": True})


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("report_to: [none]\noutput_dir: null\nbf16: null\n", []),
        ("report_to: none\n", []),
        # Another default than null.
        ("pad_to_multiple_of: null\n", []),
        ("fp16: true\n", []),
    ],
    ids=str,
)
def test_a_key_that_is_null_as_by_default_or_names_no_tracker_is_not_overridden(
    body: str, told: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(f"use_cpu: true\n{body}", encoding="utf-8")
    request = ReadCommandRequest("sft", ("--config", str(file)), {}, "cpu")
    assert [item.key for item in read_command(request, JobContext(tmp_path, 0.0)).overrides] == told


@pytest.mark.parametrize(
    ("trainer", "key", "value"), [("sft", "lora_target_modules", "all-linear"), ("online_dpo", "beta", 0.2)]
)
def test_one_value_is_no_fault_where_it_is_taken_in_place_of_a_list(
    trainer: str, key: str, value: object, tmp_path: Path
) -> None:
    request = ReadCommandRequest(trainer, (), {key: value}, "cpu")
    assert not [fault for fault in read_command(request, JobContext(tmp_path, 0.0)).faults if fault.key == key]
