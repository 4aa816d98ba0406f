"""Contract with TRL and DeepSpeed: which trainers offload activations where ZeRO-3 shares the weights out.

Each trains a step on the CPU, with DeepSpeed's real engine and as its only rank, in a process of its own.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from autotune.techniques.activation_offloading import ActivationOffloading
from autotune.trainers import find_trainer, trainers
from autotune.trainers.fused_head import FusedHead
from tests.contract.ranks import trained_alone
from tests.step.test_ranks import needs_deepspeed

OFFERING = [
    name
    for name, trainer in trainers().items()
    if ActivationOffloading.name in {item.name for item in trainer.techniques}
]
pytestmark = [pytest.mark.slow, pytest.mark.nightly, needs_deepspeed]
REASON = "'Tensor' object has no attribute 'ds_status'"
# TRL offloads from an accelerator by streams to pinned memory. On the CPU, the same hooks copy within its memory.
_SCRIPT = """
import sys
from importlib import import_module
from pathlib import Path
from unittest import mock

import torch

from tests.contract.ranks import alone
from tests.contract.building import built
from tests.step.plans import zero

name, stage, model, folder = sys.argv[1:]
alone(Path(folder))

module = import_module(f"trl.trainer.{name}_trainer")
offloading = module.get_act_offloading_ctx_manager
offloaded = []


def on_the_cpu(model):
    with mock.patch.object(torch.accelerator, "current_accelerator", lambda: torch.device("cpu")):
        manager = offloading(model, use_pin_memory=False, use_streams=False, min_offload_size=1)
    pack = manager.pack_hook
    manager.pack_hook = lambda tensor: offloaded.append(pack(tensor)) or offloaded[-1]
    return manager


torch.cpu.empty_cache = lambda: None
module.get_act_offloading_ctx_manager = on_the_cpu
fields = {"gradient_checkpointing": False, "max_steps": 1, "max_length": 32, **zero(int(stage))}
built(name, Path(model), Path(folder) / "out", activation_offloading=True, **fields).train()
assert offloaded
"""


def train(name: str, stage: int, model: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Train a step of a trainer that offloads activations, with a stage of ZeRO."""
    return trained_alone(_SCRIPT, name, str(stage), str(model), str(folder))


@pytest.mark.parametrize("name", OFFERING)
def test_a_fused_head_cannot_gather_its_weight_where_activations_are_offloaded(
    small_model_directory: Path, tmp_path: Path, name: str
) -> None:
    done = train(name, 3, small_model_directory, tmp_path)
    # Where this trains, a release has mended it: the rule of `FusedHead` can go.
    if isinstance(find_trainer(name), FusedHead):
        assert REASON in done.stderr[done.stderr.rindex("Traceback") :]
    else:
        assert done.returncode == 0, done.stderr[-2000:]


def test_activations_are_offloaded_where_each_rank_has_the_whole_head(
    small_model_directory: Path, tmp_path: Path
) -> None:
    done = train("sft", 2, small_model_directory, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
