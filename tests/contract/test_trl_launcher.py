"""Contract with TRL's command: by which file one process is started, and what a file sets over the user's variables."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest

trl = pytest.importorskip("trl")


def test_trl_ships_a_file_that_starts_one_process_without_an_engine() -> None:
    import yaml
    from trl.cli.accelerate_config import resolve_accelerate_config_argument

    option, file, *further = resolve_accelerate_config_argument(["--accelerate_config", "single_gpu", "--x"])
    assert (option, further) == ("--config_file", ["--x"])
    document = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    assert document["distributed_type"] == "NO"
    assert document.get("gpu_ids", "all") == "all"
    assert not document.keys() & {"deepspeed_config", "fsdp_config", "parallelism_config", "dynamo_config"}


def test_a_variable_of_the_file_takes_the_place_of_the_user_s(tmp_path: Path) -> None:
    # So a bundle does not name the GPU there.
    (tmp_path / "config.yaml").write_text("env: {CUDA_VISIBLE_DEVICES: '0'}\n", encoding="utf-8")
    with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": "3"}):
        trl.TrlParser((trl.ModelConfig,)).parse_args_and_config(["--config", str(tmp_path / "config.yaml")])
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
