"""accelerate's default file is found and read as by its own launcher."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.app.arguments import CheckArguments
from autotune.app.check.verdict_cache import key_of
from autotune.app.planned import planned_machine
from autotune.core.configuration import ReadCommand
from autotune.core.documents.verdict import Outcome
from autotune.inspection.command_line import read_command_line
from autotune.userconfig.launch import default_file, launching
from autotune.userconfig.launch_problems import launch_findings
from autotune.userconfig.written import WrittenConfig
from autotune.userconfig.written import read_written as written_by
from tests.app.check.conftest import Checked, Write
from tests.app.check.starting import read_by_accelerate

SCRIPT = "trl/scripts/sft.py"


def launched(words: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, int | None]:
    """Return by which function accelerate starts a script, and with how many processes, as its own parser reads it."""
    import accelerate.commands.launch as module

    used: list[tuple[str, int | None]] = []
    for name in ("simple_launcher", "multi_gpu_launcher", "deepspeed_launcher"):
        monkeypatch.setattr(module, name, lambda args, name=name: used.append((name, args.num_processes)))
    monkeypatch.setattr(module, "default_config_file", str(folder / "accelerate" / "default_config.yaml"))
    monkeypatch.setattr(
        "accelerate.commands.config.config_args.default_config_file", str(folder / "accelerate/default_config.yaml")
    )
    module.launch_command(module.launch_command_parser().parse_args([*words.split(), "train.py"]))
    return used[0]


@pytest.mark.parametrize(
    ("document", "words", "processes", "kind"),
    [
        ({"distributed_type": "DEEPSPEED", "num_processes": 8}, "", 8, "DEEPSPEED"),
        ({"distributed_type": "DEEPSPEED", "num_processes": 8}, "--num_processes 2", 2, "DEEPSPEED"),
        ({"distributed_type": "DEEPSPEED", "num_processes": 8}, "--multi_gpu --num_processes 2", 2, "MULTI_GPU"),
        ({"distributed_type": "FSDP", "num_processes": 4, "num_machines": 1}, "", 4, "FSDP"),
        ({"distributed_type": "NO", "num_processes": 1}, "", 1, "NO"),
        ({"distributed_type": "NO", "num_processes": 1}, "--num_processes 8", 1, "NO"),
        ({"distributed_type": "NO", "num_processes": 1}, "--multi_gpu --num_processes 8", 8, "MULTI_GPU"),
    ],
    ids=str,
)
def test_accelerate_s_default_file_is_read_where_no_other_is_named(
    document: dict[str, object],
    words: str,
    processes: int,
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    command = read_command_line([*f"accelerate launch {words} {SCRIPT}".split(), "--config", "c.yaml"])
    assert default_file(command) is None
    file = tmp_path / "accelerate" / "default_config.yaml"
    file.parent.mkdir()
    file.write_text(yaml.safe_dump({"num_machines": 1, "use_cpu": False, **document}), encoding="utf-8")
    used, count = launched(words, tmp_path, monkeypatch)
    assert (1 if used == "simple_launcher" else count) == processes

    written = WrittenConfig(command, None, "sft", default_file(command))
    found = launching(written, read_by_accelerate(written))
    assert (found.processes, found.document["distributed_type"], found.file) == (processes, kind, str(file))
    told = [item.message for item in launch_findings(written, ReadCommand(), found)]
    assert f"distributed_type: {found.document['distributed_type']}" in told[0]
    assert str(file) in told[0]
    assert ("accelerate starts one process instead of 8" in told[-1]) is (processes == 1 and "8" in words)


@pytest.mark.parametrize(
    ("document", "words", "on_cpu"),
    [
        ({"distributed_type": "NO", "use_cpu": True}, "", True),
        ({"distributed_type": "NO", "use_cpu": False}, "", False),
        ({"distributed_type": "NO", "use_cpu": False}, "--cpu", True),
        ({"distributed_type": "MULTI_GPU", "use_cpu": True}, "", False),
    ],
    ids=str,
)
def test_the_cpu_that_accelerate_tells_a_single_process_to_use_is_read(
    document: dict[str, object], words: str, on_cpu: bool, tmp_path: Path
) -> None:
    import accelerate.commands.launch as module
    from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

    several = document["distributed_type"] == "MULTI_GPU"
    file = tmp_path / "own.yaml"
    file.write_text(yaml.safe_dump({"num_machines": 1, "num_processes": 1 + several, **document}), encoding="utf-8")
    options = f"--config_file {file} {words}"
    arguments: Any = module.launch_command_parser().parse_args([*options.split(), "train.py"])
    module._validate_launch_command(arguments)
    env = prepare_multi_gpu_env(arguments) if several else prepare_simple_launcher_cmd_env(arguments)[1]
    assert (env.get("ACCELERATE_USE_CPU") == "True") is on_cpu
    command = read_command_line([*f"accelerate launch {options} {SCRIPT}".split(), "--config", "c.yaml"])
    written = WrittenConfig(command, None, "sft")
    assert launching(written, read_by_accelerate(written)).on_cpu is on_cpu


def test_a_cpu_for_accelerate_and_a_gpu_for_trl_end_the_training(
    write: Write, checked: Checked, tmp_path: Path
) -> None:
    (tmp_path / "own.yaml").write_text("distributed_type: 'NO'\nnum_processes: 1\nuse_cpu: true\n", encoding="utf-8")
    file = write("sft", f"accelerate_config: {tmp_path / 'own.yaml'}\n")
    verdict = checked(config=str(file), trainer="sft", gpu="H100-80GB")
    assert verdict.outcome is Outcome.CANNOT_RUN
    assert any("use_cpu puts the model on the CPU" in item.message for item in verdict.findings)


@pytest.mark.parametrize("words", ["torchrun", "deepspeed", "python", "accelerate launch --cpu"])
def test_accelerate_s_default_file_is_read_by_no_other_launcher_and_not_for_a_cpu(words: str, tmp_path: Path) -> None:
    file = tmp_path / "default_config.yaml"
    file.write_text("distributed_type: FSDP\nnum_processes: 8\n", encoding="utf-8")
    command = read_command_line([*words.split(), SCRIPT, "--config", "c.yaml"])
    written = WrittenConfig(command, None, "sft", file)
    found = launching(written, read_by_accelerate(written))
    assert (found.processes, found.document, found.file) == (1, {}, "")


@pytest.mark.parametrize("variable", ["HF_HOME", "XDG_CACHE_HOME"])
def test_accelerate_s_default_file_is_looked_for_where_accelerate_does(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    spec = find_spec("accelerate.commands.config.config_args")
    assert spec is not None
    assert spec.loader is not None
    module: Any = module_from_spec(spec)
    with monkeypatch.context() as patch:
        patch.setenv(variable, str(tmp_path))
        spec.loader.exec_module(module)
    file = Path(module.default_config_file)
    file.parent.mkdir(parents=True)
    file.write_text("{}", encoding="utf-8")
    start = ["accelerate", "launch", SCRIPT, "--config", "c.yaml"]
    assert default_file(read_command_line([f"{variable}={tmp_path}", *start])) == file
    monkeypatch.setenv(variable, str(tmp_path))
    assert default_file(read_command_line(start)) == file


def test_a_verdict_is_kept_for_what_accelerate_s_default_file_says(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    asked, planned = CheckArguments(str(write("sft", "")), trainer="sft"), planned_machine("H100-80GB")
    file = tmp_path / "accelerate" / "default_config.yaml"
    file.parent.mkdir()

    def key() -> str | None:
        found = written_by(asked.config, asked.trainer)
        return key_of(asked, replace(found, default=default_file(found.command)), planned)

    keys = [key()]
    for text in ("distributed_type: MULTI_GPU\nnum_processes: 8\n", "distributed_type: FSDP\nnum_processes: 8\n"):
        file.write_text(text, encoding="utf-8")
        keys.append(key())
    assert len(set(keys)) == 3


@pytest.mark.parametrize("home", ["x" * 300, "~no-one/x"])
def test_a_home_that_cannot_be_looked_at_has_no_file(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", home)
    assert default_file(read_command_line(["trl", "sft"])) is None


def test_no_launcher_of_accelerate_can_start_a_process_while_a_launch_is_read() -> None:
    from accelerate.commands.launch import launch_command

    from autotune.step.jobs.accelerate_launch import _LAUNCHERS

    assert {name for name in launch_command.__code__.co_names if name.endswith("_launcher")} == set(_LAUNCHERS)
