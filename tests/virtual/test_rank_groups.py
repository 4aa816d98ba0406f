"""The process group of a trace: what its collectives of Python objects receive."""

from __future__ import annotations

import torch.distributed as dist

from autotune.virtual.ranks import World, process_group


def test_every_rank_is_taken_to_have_the_same_object() -> None:
    with process_group(World(3, 1)):
        found: list[object] = [None] * 3
        dist.all_gather_object(found, {"prompt": "the same"})
        assert found == [{"prompt": "the same"}] * 3
    assert not dist.is_initialized()
