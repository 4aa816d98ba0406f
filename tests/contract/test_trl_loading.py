"""Contract with transformers, accelerate and TRL: the share of a model that each process reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers.integrations import is_deepspeed_zero3_enabled, is_fsdp_enabled
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from trl.trainer.utils import create_model_from_path

from tests.small import write_small_model
from tests.step.plans import needs_deepspeed


@pytest.fixture
def read_by_the_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A model; this process is the second of two that ``accelerate launch`` started with FSDP2."""
    # transformers writes models in the first process only.
    model = write_small_model(tmp_path / "model", tokenizer=False)
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    for name in ("ACCELERATE_USE_FSDP", "FSDP_CPU_RAM_EFFICIENT_LOADING"):
        monkeypatch.setenv(name, "true")
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield model
    dist.destroy_process_group()


def test_each_process_reads_the_whole_model_with_cpu_ram_efficient_loading_too(read_by_the_second: Path) -> None:
    model = create_model_from_path(str(read_by_the_second), dtype="float32", device_map=None)
    assert is_fsdp_enabled()
    # Where this fails, one process of a machine reads the model: the host's need, the bundle and the finding of a check
    # follow (docs/devices.md; huggingface/transformers issue 43749).
    assert {tensor.device for tensor in model.parameters()} == {torch.device("cpu")}


@needs_deepspeed
@pytest.mark.parametrize("flag", [True, False])
def test_zero3_shares_weights_out_as_they_are_read_whatever_zero3_init_flag_says(flag: bool) -> None:
    from accelerate import DeepSpeedPlugin

    plugin = DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 3}}, zero3_init_flag=flag)
    try:
        # As the trainer's arguments do (transformers/training_args.py), before any model.
        plugin.set_deepspeed_weakref()
        assert plugin.zero3_init_flag is flag
        assert is_deepspeed_zero3_enabled()
    finally:
        unset_hf_deepspeed_config()
