"""The commands of a server and its training: TRL's own parsers read what they are."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from trl.cli.accelerate_config import resolve_accelerate_config_argument

from autotune.core.plan import Launch, TrainingPlan
from autotune.emit.serving import serve_command, train_command


def words(command: str) -> tuple[dict[str, str], list[str]]:
    """Return the variables that a command sets, and its words."""
    read = shlex.split(command)
    set_first = [word for word in read if word.startswith("CUDA_VISIBLE_DEVICES=")]
    return dict(word.split("=", 1) for word in set_first), read[len(set_first) :]


def test_trl_s_server_reads_its_command(tmp_path: Path) -> None:
    serve = pytest.importorskip("trl.scripts.vllm_serve")
    model = str(tmp_path / "my model")
    variables, (program, name, *options) = words(serve_command(model, 4, 1536, "v2"))

    assert variables == {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    assert (program, name) == ("trl", "vllm-serve")
    [read, further] = serve.make_parser().parse_args_and_config(options, return_remaining_strings=True)
    assert further == []
    assert (read.model, read.tensor_parallel_size, read.max_model_len, read.revision) == (model, 4, 1536, "v2")
    assert read.data_parallel_size == 1
    # What vLLM's own command gets from it.
    passed = serve.build_command(read)
    assert passed[passed.index("--tensor-parallel-size") + 1] == "4"


def test_the_server_takes_the_share_of_its_gpus_that_is_planned_with() -> None:
    serve = pytest.importorskip("trl.scripts.vllm_serve")
    from autotune.planning.serving import UTILIZATION

    assert serve.ScriptArguments(model="m").gpu_memory_utilization == UTILIZATION


def test_the_training_runs_on_the_other_gpus_and_asks_the_server(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    plan = TrainingPlan("grpo", {"use_vllm": True, "vllm_mode": "server"}, launch=Launch(4))
    variables, (program, name, *options) = words(train_command(plan, 4, by_command=True))

    assert variables == {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    assert (program, name) == ("trl", "grpo")
    # The file of a bundle for one process.
    text = f"output_dir: {tmp_path}\nuse_cpu: true\nbf16: false\nnum_processes: 1\naccelerate_config: single_gpu\n"
    (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
    place = options.index("config.yaml")
    options[place] = str(tmp_path / "config.yaml")
    # `trl` hands what its parser does not know to `accelerate launch`.
    read, further = trl.TrlParser((trl.GRPOConfig,)).parse_args_and_config(options, return_remaining_strings=True)
    assert (read.use_vllm, read.vllm_mode) == (True, "server")
    arguments = launch_command_parser().parse_args([*resolve_accelerate_config_argument(further), "grpo.py"])
    started, *_ = _validate_launch_command(arguments)
    assert (started.num_processes, started.multi_gpu, started.use_deepspeed) == (4, True, False)


def test_an_engine_of_the_file_stays() -> None:
    plan = TrainingPlan("grpo", {"vllm_mode": "server", "deepspeed": {"zero_optimization": {}}}, launch=Launch(4))
    assert "--multi_gpu" not in train_command(plan, 4, by_command=True)


def test_a_trainer_without_a_command_is_started_by_its_script() -> None:
    plan = TrainingPlan("online_dpo", {"use_vllm": True, "vllm_mode": "server"}, launch=Launch(2))
    assert train_command(plan, 1, by_command=False) == (
        "CUDA_VISIBLE_DEVICES=1,2 accelerate launch --num_processes 2 train.py"
    )
