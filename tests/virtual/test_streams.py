"""Streams of the virtual device, as engines ask for them."""

from __future__ import annotations

import torch

from autotune.virtual import trace


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
