"""TRL's own parser reads the command of a vLLM server."""

from __future__ import annotations

import shlex
from pathlib import Path

from autotune.emit.serving import serve_command
from autotune.inspection.cuda import BY_ADDRESS


def words(command: str) -> tuple[dict[str, str], list[str]]:
    """Return the variables that a command sets, and its words."""
    read = shlex.split(command)
    set_first = [word for word in read if word.startswith("CUDA_")]
    return dict(word.split("=", 1) for word in set_first), read[len(set_first) :]


def test_trl_s_server_reads_its_command(tmp_path: Path) -> None:
    from trl.scripts import vllm_serve as serve

    model = str(tmp_path / "my model")
    variables, (program, name, *options) = words(serve_command(model, 4, 1536, "v2", BY_ADDRESS))

    assert variables == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    assert (program, name) == ("trl", "vllm-serve")
    [read, further] = serve.make_parser().parse_args_and_config(options, return_remaining_strings=True)
    assert further == []
    assert (read.model, read.tensor_parallel_size, read.max_model_len, read.revision) == (model, 4, 1536, "v2")
    assert read.data_parallel_size == 1
    # What vLLM's own command gets from it.
    passed = serve.build_command(read)
    assert passed[passed.index("--tensor-parallel-size") + 1] == "4"


def test_the_server_takes_the_share_of_its_gpus_that_is_planned_with() -> None:
    from trl.scripts import vllm_serve as serve

    from autotune.app.servers import UTILIZATION

    assert serve.ScriptArguments(model="m").gpu_memory_utilization == UTILIZATION
