"""Requests of multi-process engines to a trace: streams of the virtual device, and the group of its ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from autotune.virtual import trace
from autotune.virtual.ranks import World, process_group
from autotune.virtual.recording.streams import Stream


def test_the_current_stream_is_the_same_by_either_name() -> None:
    def fn(device: torch.device) -> None:
        known = getattr(torch, device.type)
        own = known.Stream()
        with known.stream(own):
            assert torch.accelerator.current_stream() is known.current_stream() is own
        # FSDP2 waits so for weights that it gathered and did not use.
        torch.accelerator.current_stream().wait_event(known.Event())
        assert torch.accelerator.current_stream() is known.default_stream()

    trace(fn)


def test_a_virtual_stream_has_what_pytorchs_has() -> None:
    """FSDP2 of PyTorch 2.15 reads a stream's numbers. A virtual stream has no driver, and so no handle."""
    named = {name for name in dir(torch.Stream) if not name.startswith("_")}
    assert named - set(dir(Stream)) <= {"device", "native_handle"}


def test_no_virtual_stream_captures_a_graph() -> None:
    """From PyTorch 2.15 on, Adam asks that on every accelerator in each step; before, on CUDA and XPU alone."""
    assert not Stream().is_capturing()


def test_every_rank_is_taken_to_have_the_same_object() -> None:
    with process_group(World(3, 1)):
        found: list[object] = [None] * 3
        dist.all_gather_object(found, {"prompt": "the same"})
        assert found == [{"prompt": "the same"}] * 3
    assert not dist.is_initialized()


def test_a_gathered_tensor_that_was_waited_for_is_not_copied() -> None:
    """On null GPUs, PyTorch's allocator has one whole weight at a time while FSDP2 saves."""

    def fn(device: torch.device) -> None:
        mesh = init_device_mesh(device.type, (2,))
        part = torch.empty(256, 512, device=device)
        DTensor.from_local(part, mesh, [Shard(0)]).full_tensor()

    part_bytes = 256 * 512 * 4
    assert trace(fn, target="cuda", world=World(2, 0)).device_peak.bytes == part_bytes + 2 * part_bytes


def test_ddp_sends_the_weights_of_the_first_rank_from_a_copy_in_one_piece() -> None:
    """On a null GPU, GRPO with LoRA reserves 8 MiB (3 %) less for the segment that this leaves in the cache."""

    def fn(device: torch.device) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 2)).to(device)
        model[0].requires_grad_(False)
        DistributedDataParallel(model)

    weights_bytes = (512 * 512 + 512 + 512 * 2 + 2) * 4
    assert trace(fn, target="cuda", world=World(2, 0)).device_peak.bytes == 2 * weights_bytes
