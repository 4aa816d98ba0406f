"""The bundle of a plan claims no measurement; TRL, accelerate and a shell read its files."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from trl.cli.accelerate_config import resolve_accelerate_config_argument

from autotune.core.documents.bundle import PlannedBundle, ServerSplit
from autotune.core.files.codec import decode
from autotune.core.machine import Hardware
from autotune.core.plan import Launch
from autotune.emit.bundle import remove_planned_bundle, write_planned_bundle
from autotune.emit.figures import SERVER_TIMEOUT, planned
from autotune.inspection.cuda import BY_ADDRESS
from autotune.units import GIB
from tests.emit.bundles import arguments_in, text_of
from tests.emit.planned_bundles import ARGS, MODEL, SPLIT, a_bundle
from tests.reporting.examples import a_workload


def write(document: PlannedBundle, folder: Path, threads: int | None = None, variables: str = "") -> Path:
    """Write a bundle to a folder, and return that."""
    hardware = Hardware("cuda", document.device, 80 * GIB, processes=document.processes, variables=variables)
    workload = a_workload(trainer=document.trainer)
    write_planned_bundle(document, planned(document, workload, hardware, max_tokens=48, threads=threads), folder)
    return folder


@pytest.fixture
def served(tmp_path: Path) -> Path:
    """The bundle of a split, in a folder whose name a shell has to quote."""
    return write(a_bundle(), tmp_path / "my bundle")


def names(folder: Path) -> list[str]:
    """Return the names of the files in a folder."""
    return sorted(file.name for file in folder.iterdir())


def test_a_split_has_a_script_for_each_side(served: Path) -> None:
    assert names(served) == ["accelerate.yaml", "config.yaml", "plan.json", "serve.sh", "train.py", "train.sh"]
    assert all(os.access(served / name, os.X_OK) for name in ("serve.sh", "train.sh"))


@pytest.mark.parametrize("split", [SPLIT, None])
def test_no_file_claims_a_measurement(split: ServerSplit | None, tmp_path: Path) -> None:
    folder = write(a_bundle(split), tmp_path)
    for name in ("config.yaml", "train.py"):
        said = text_of(folder / name)
        assert "it has not run, and nothing was measured" in said
        of_figures = said.replace("nothing was measured", "").replace("which measured nothing", "")
        assert not re.search(r"[Mm]easured|recommended|showed|confirmed", of_figures)
        assert "give or take 10 %" in said
        assert "with completions as long as possible" in said
    assert decode(PlannedBundle, json.loads((folder / "plan.json").read_text())) == a_bundle(split)
    assert json.loads((folder / "plan.json").read_text())["basis"] == "planned"
    for script in folder.glob("*.sh"):
        assert "# Planned by autotune" in script.read_text(encoding="utf-8")


def test_threads_of_an_optimizer_on_the_host_are_asked_for_where_the_machine_is_not_known(tmp_path: Path) -> None:
    offloaded = {"deepspeed": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}}
    document = a_bundle(None)
    on_host = replace(document, plan=replace(document.plan, args={**ARGS, **offloaded}))
    for name, bundle, threads, asked in (
        ("unknown", on_host, None, True), ("known", on_host, 8, False), ("on the GPU", document, None, False),
    ):  # fmt: skip
        assert ("without OMP_NUM_THREADS" in text_of(write(bundle, tmp_path / name, threads) / "config.yaml")) == asked


def test_the_doubts_of_the_plan_are_in_the_head(tmp_path: Path) -> None:
    doubt = "The margin is below the stated error: it may not fit."
    folder = write(a_bundle(doubts=(doubt,)), tmp_path)
    for name in ("config.yaml", "train.py"):
        assert f"give or take 10 %. {doubt}" in text_of(folder / name)


def test_speed_is_said_only_where_it_is_predicted(tmp_path: Path) -> None:
    with_speed = text_of(write(a_bundle(None), tmp_path / "alone") / "config.yaml")
    assert "and 9,000 tok/s on typical ones" in with_speed
    assert "Speed was planned with completions of 8 tokens on average" in with_speed
    without = text_of(write(a_bundle(), tmp_path / "served") / "config.yaml")
    assert "tok/s" not in without
    assert "Speed" not in without


def test_trl_reads_the_configuration_and_hands_on_the_launch(served: Path, tmp_path: Path) -> None:
    parser = importlib.import_module("trl.scripts.grpo").make_parser()
    words = ["--config", str(served / "config.yaml"), "--output_dir", str(tmp_path)]
    _, config, model, *_, further = parser.parse_args_and_config(words, return_remaining_strings=True)
    assert model.model_name_or_path == MODEL
    assert (config.use_vllm, config.vllm_mode) == (True, "server")
    assert config.vllm_server_timeout == SERVER_TIMEOUT
    assert further == ["--num_processes", "2", "--accelerate_config", "multi_gpu", "--mixed_precision", "no"]


def test_accelerate_reads_how_many_processes_train(served: Path) -> None:
    reader: Any = importlib.import_module("accelerate.commands.config.config_args")
    read = reader.load_config_from_file(str(served / "accelerate.yaml"))
    assert (read.num_processes, read.num_machines, read.distributed_type) == (2, 1, "MULTI_GPU")


@pytest.fixture
def called(tmp_path: Path) -> Callable[..., tuple[str, str, list[str]]]:
    """Run a script from elsewhere with programs that print their names, the order of GPUs, the GPUs, and words."""
    programs = tmp_path / "programs"
    programs.mkdir()
    gpus = "${CUDA_DEVICE_ORDER:+$CUDA_DEVICE_ORDER }$CUDA_VISIBLE_DEVICES"
    for name in ("trl", "accelerate", "python"):
        (programs / name).write_text(f'#!/bin/sh\nprintf "%s\\n" "${{0##*/}}" "{gpus}" "$@"\n')
        (programs / name).chmod(0o755)

    def run(script: Path, *words: str) -> tuple[str, str, list[str]]:
        environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": "7"}
        told = subprocess.check_output([script, *words], env=environment, cwd=tmp_path, text=True)
        name, gpus, *rest = told.splitlines()
        return name, gpus, rest

    return run


def test_trl_s_server_runs_on_its_gpus_where_the_training_looks_for_it(served: Path, called: Any) -> None:
    serve: Any = importlib.import_module("trl.scripts.vllm_serve")
    name, gpus, (command, *words) = called(served / "serve.sh", "--dtype", "bfloat16")
    assert (name, gpus, command) == ("trl", "0,1", "vllm-serve")
    [read, further] = serve.make_parser().parse_args_and_config(words, return_remaining_strings=True)
    assert (further, read.tensor_parallel_size, read.max_model_len, read.dtype) == ([], 2, 48, "bfloat16")
    config = yaml.safe_load((served / "config.yaml").read_text(encoding="utf-8"))
    assert (config["vllm_server_host"], config["vllm_server_port"]) == (read.host, read.port)
    # No other machine reaches the endpoints that replace the server's weights.
    assert read.host == "127.0.0.1"


@pytest.mark.parametrize(("variables", "order"), [("", ""), (BY_ADDRESS, "PCI_BUS_ID ")])
def test_the_training_runs_on_the_others_from_any_directory(
    variables: str, order: str, tmp_path: Path, called: Any
) -> None:
    folder = write(a_bundle(), tmp_path / "my bundle", variables=variables)
    found = called(folder / "train.sh", "--max_steps", "2")
    assert found == ("trl", f"{order}2,3", ["grpo", "--config", str(folder / "config.yaml"), "--max_steps", "2"])


@pytest.mark.parametrize("processes", [2, 1])
def test_a_trainer_without_a_command_is_started_by_its_script(processes: int, tmp_path: Path, called: Any) -> None:
    document = a_bundle(replace(SPLIT, training=processes), "online_dpo", processes=processes)
    plan = replace(document.plan, launch=Launch(processes))
    folder = write(replace(document, plan=plan), tmp_path / "bundle")
    assert "config.yaml" not in names(folder)
    script = str(folder / "train.py")
    launch = ["launch", "--config_file", str(folder / "accelerate.yaml"), script]
    expected = ("accelerate", "2,3", launch) if processes == 2 else ("python", "2", [script])
    assert called(folder / "train.sh") == expected


def test_the_script_has_the_same_arguments_and_says_which_gpus_train(served: Path) -> None:
    config = yaml.safe_load((served / "config.yaml").read_text(encoding="utf-8"))
    launch = {"num_processes", "accelerate_config", "mixed_precision"}
    assert arguments_in(served / "train.py") == {key: value for key, value in config.items() if key not in launch}
    assert "export CUDA_VISIBLE_DEVICES=2,3" in text_of(served / "train.py")


def test_a_server_elsewhere_is_named_with_its_command(tmp_path: Path) -> None:
    plan = replace(a_bundle(None).plan, args={**ARGS, "use_vllm": True, "vllm_mode": "server"})
    folder = write(a_bundle(None, plan=plan, tokens_per_second=None), tmp_path)
    assert not list(folder.glob("*.sh"))
    assert f"trl vllm-serve --model {MODEL} --max-model-len 48" in text_of(folder / "config.yaml")


def test_threads_are_written_only_for_a_machine_that_is_known(tmp_path: Path) -> None:
    files = [write(a_bundle(), tmp_path / str(threads), threads) / "config.yaml" for threads in (None, 3)]
    unknown, known = (yaml.safe_load(file.read_text(encoding="utf-8")) for file in files)
    assert "env" not in unknown
    assert known["env"] == {"OMP_NUM_THREADS": "3"}


def test_several_machines_need_what_is_not_known_here(tmp_path: Path) -> None:
    document = a_bundle(None)
    folder = write(replace(document, plan=replace(document.plan, launch=Launch(2, 2))), tmp_path)
    assert "On each of 2 machines, give --main_process_ip with the address" in text_of(folder / "config.yaml")
    parser = importlib.import_module("trl.scripts.grpo").make_parser()
    words = ["--main_process_ip", "node-0", "--machine_rank", "1"]
    *_, of_file, further = parser.parse_args_and_config(
        ["--config", str(folder / "config.yaml"), "--output_dir", str(tmp_path), *words],
        return_remaining_strings=True,
        separate_remaining_strings=True,
    )
    assert further == words
    launch = resolve_accelerate_config_argument([*of_file, *further])
    read, _, _ = _validate_launch_command(launch_command_parser().parse_args([*launch, "grpo.py"]))
    prepare_multi_gpu_env(read)
    assert (read.nnodes, read.nproc_per_node, read.node_rank) == ("2", "1", 1)
    assert read.rdzv_endpoint == "node-0:29500"


def test_the_host_memory_of_several_processes_is_in_the_head(tmp_path: Path) -> None:
    several, alone = a_bundle(None, host_bytes=40 * GIB), a_bundle(None)
    alone = replace(alone, host_bytes=40 * GIB, processes=1, plan=replace(alone.plan, launch=Launch()))
    for name, bundle, shown in (("several", several, True), ("alone", alone, False), ("before", a_bundle(None), False)):
        head = text_of(write(bundle, tmp_path / name) / "config.yaml")
        assert ("A machine needs up to 40.00 GiB of host memory, for all processes on it." in head) == shown


def test_another_plan_takes_the_place_of_the_files_that_it_has_not(served: Path) -> None:
    write(a_bundle(None), served)
    assert names(served) == ["accelerate.yaml", "config.yaml", "plan.json", "train.py"]
    remove_planned_bundle(served)
    assert names(served) == []
