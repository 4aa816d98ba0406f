"""Contract with bitsandbytes: its versions, and the shards that it and others cannot update (FSDP2, 2^31 elements).

DeepSpeed makes one tensor of a process's share of the weights, which may have so many.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from accelerate.utils.fsdp_utils import fsdp2_switch_optimizer_parameters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import optimization

from autotune.planning.vllm import QUANTISED_BYTES
from autotune.techniques import find, versions
from autotune.techniques.base import CrashReason
from autotune.trainers import find_trainer
from tests.settings import WITH_DEEPSPEED, machine_with, problem, setting, workload
from tests.step.plans import needs_deepspeed

ROWS = 8192
"""Rows of a matrix that is large enough for state in 8 bits."""
OF_BITSANDBYTES = ("paged_adamw_32bit", "adamw_bnb_8bit", "paged_adamw_8bit", "lion_8bit")


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_the_lowest_version_is_that_of_transformers() -> None:
    from transformers.utils.import_utils import BITSANDBYTES_MIN_VERSION

    assert versions.accepted_versions("bitsandbytes") == f">={BITSANDBYTES_MIN_VERSION}"


@pytest.mark.parametrize("name", ["PagedAdamW32bit", "AdamW8bit", "PagedAdamW8bit", "Lion8bit", "Adafactor"])
def test_an_optimizer_updates_a_whole_parameter_and_no_sharded_one(name: str, mesh: DeviceMesh) -> None:
    optim = optimization if name == "Adafactor" else pytest.importorskip("bitsandbytes").optim
    whole = torch.nn.Parameter(torch.ones(ROWS, 16))
    sharded = torch.nn.Parameter(distribute_tensor(torch.ones(ROWS, 16), mesh, [Shard(0)]))
    for parameter in (whole, sharded):
        parameter.grad = torch.ones_like(parameter)
    getattr(optim, name)([whole]).step()
    assert (whole < 1).all()
    with pytest.raises(RuntimeError, match=r"DTensor|sharding strategy"):
        getattr(optim, name)([sharded]).step()


@pytest.mark.parametrize(("name", "fails"), [("Adagrad", True), ("AdamW", False), ("RMSprop", False), ("SGD", False)])
def test_a_checkpoint_has_no_state_of_weights_that_accelerate_replaces_by_shards(
    name: str, fails: bool, mesh: DeviceMesh
) -> None:
    whole = torch.nn.Parameter(torch.ones(ROWS, 16))
    sharded = torch.nn.Parameter(distribute_tensor(torch.ones(ROWS, 16), mesh, [Shard(0)]))
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)([whole], lr=0.1)
    # As `Accelerator._prepare_fsdp2`, which remembers weights by their addresses.
    stand_in: Any = torch.empty(1)
    stand_in.data_ptr = whole.data_ptr()
    optimizer.param_groups[0]["params"] = [stand_in]
    fsdp2_switch_optimizer_parameters(optimizer, {whole.data_ptr(): sharded})
    sharded.grad = torch.ones_like(sharded)
    # PyTorch 2.11 fails already in the step.
    with pytest.raises(KeyError) if fails else nullcontext():
        optimizer.step()
        optimizer.state_dict()


@needs_deepspeed
@pytest.mark.parametrize("module", ["stage_1_and_2", "stage3"])
def test_deepspeed_makes_adagrad_anew_with_one_group_of_weights(module: str) -> None:
    spec = find_spec(f"deepspeed.runtime.zero.{module}")
    assert spec is not None
    source = Path(str(spec.origin)).read_text(encoding="utf-8")
    # A list of tensors is a single group.
    assert re.search(r"torch\.optim\.Adagrad\(self\.\w+, \*\*self\.optimizer\.defaults\)", source)


def test_weights_in_8_bits_have_no_scales_where_fsdp2_shards_them(mesh: DeviceMesh) -> None:
    modules = pytest.importorskip("bitsandbytes").nn
    whole, sharded = (modules.Linear8bitLt(16, 16, bias=False, has_fp16_weights=False).to("cpu") for _ in range(2))
    assert whole(torch.ones(2, 16)).shape == (2, 16)
    # torch 2.11 refuses to shard integers.
    with pytest.raises((AttributeError, RuntimeError), match=r"no attribute 'CB'|floating point dtype"):
        fully_shard(sharded, mesh=mesh)(torch.ones(2, 16))


def test_they_are_no_candidates_beside_fsdp2() -> None:
    four = machine_with(WITH_DEEPSPEED, processes=4)
    of = problem(setting(machine=four, allowed=frozenset(["optimizer"])))
    optimizer = find("optimizer", find_trainer("sft").techniques)
    told = {
        (choice, engine): optimizer.conflict(choice, of.baseline.but(sharding=engine), of.setting)
        for choice in (*OF_BITSANDBYTES, "adamw_torch_fused", "adamw_torch_8bit", "adafactor")
        for engine in ("ddp", "fsdp2")
    }
    refused = {pair for pair, reason in told.items() if reason}
    assert refused == {(choice, "fsdp2") for choice in (*OF_BITSANDBYTES, "adafactor")}
    assert all(isinstance(told[pair], CrashReason) for pair in refused)
    assert told["lion_8bit", "fsdp2"] == (
        "bitsandbytes cannot update the parameters that sharding=fsdp2 shards, which are DTensors"
    )


def test_their_kernels_count_elements_in_32_bits() -> None:
    spec = find_spec("bitsandbytes")
    if spec is None or spec.origin is None:
        pytest.skip("bitsandbytes is not installed")
    kernels = Path(spec.origin).with_name("backends") / "cuda" / "ops.py"
    assert kernels.read_text(encoding="utf-8").count("ct.c_int32(g.numel())") == 2


@pytest.mark.parametrize(("processes", "refused"), [(2, {"zero1", "zero2"}), (4, set())])
def test_they_get_no_tensor_of_deepspeed_s_whose_elements_they_cannot_count(processes: int, refused: set[str]) -> None:
    of = workload(parameters=8_030_261_248)
    machine = machine_with(WITH_DEEPSPEED, processes=processes)
    here = problem(setting(machine=machine, of=of, allowed=frozenset(["lora", "optimizer"])))
    optimizer = find("optimizer", find_trainer("sft").techniques)

    def told(choice: str, **choices: str) -> set[str]:
        engines = ("ddp", "zero1", "zero2", "zero3")
        found = {
            engine: optimizer.conflict(choice, here.baseline.but(sharding=engine, **choices), here.setting)
            for engine in engines
        }
        assert all(reason is None or isinstance(reason, CrashReason) for reason in found.values())
        return {engine for engine, reason in found.items() if reason}

    assert all(told(choice) == refused for choice in OF_BITSANDBYTES)
    assert told("adamw_torch_fused") == told("paged_adamw_32bit", lora="r16") == set()


def test_vllm_holds_scales_of_weights_in_4_bits_unquantised() -> None:
    from bitsandbytes.functional import quantize_4bit

    # vLLM's bitsandbytes_loader.py undoes compress_statistics=True when it has loaded the weights (`dequantize_dq`).
    weights = torch.randn(64, 1024)
    packed, state = quantize_4bit(weights, quant_type="nf4", compress_statistics=False)
    assert packed.nbytes + state.absmax.nbytes == weights.numel() * QUANTISED_BYTES
