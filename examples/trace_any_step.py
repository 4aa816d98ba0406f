"""Predicts a training loop's GPU memory and time: traces a loop without TRL, in seconds, without a GPU.

    python examples/trace_any_step.py --gpu A100-80GB --batch 64

The loop is an ordinary one: a vision transformer of torch.nn, AdamW, mixed precision. Only `phase`, which names a part
of the loop, is for the trace; without a trace it is a range of PyTorch's profiler.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor, nn

from autotune.inspection.gpus import find_gpu
from autotune.units import format_bytes
from autotune.virtual import phase, replay, step_seconds, trace

PATCHES, WIDTH, CLASSES = 197, 768, 1000


class Classifier(nn.Module):
    """A vision transformer of ViT-B's size, over patches that are embedded already."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            WIDTH,
            nhead=12,
            dim_feedforward=4 * WIDTH,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, patches: Tensor) -> Tensor:
        """Return logits, [batch, classes], of patches, [batch, patches, width]."""
        logits: Tensor = self.head(self.layers(patches).mean(dim=1))
        return logits


def training(batch: int, layers: int) -> Callable[[torch.device], None]:
    """Return a function of a device that trains for two steps: the optimizer's state appears in the first."""

    def run(device: torch.device) -> None:
        model = Classifier(layers).to(device)
        optimizer = torch.optim.AdamW(model.parameters())
        for number in range(2):
            with phase(f"step {number}"):
                patches = torch.randn(batch, PATCHES, WIDTH, device=device)
                labels = torch.randint(CLASSES, (batch,), device=device)
                with torch.autocast(device.type, torch.bfloat16):
                    loss = nn.functional.cross_entropy(model(patches), labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    return run


def main() -> None:
    """Trace the loop, and print the memory and the time of a step."""
    parser = argparse.ArgumentParser(description="Predicts the GPU memory and the time of a training loop.")
    parser.add_argument("--gpu", default="A100-80GB", help="a GPU of the catalogue")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--layers", type=int, default=12)
    arguments = parser.parse_args()
    gpu = find_gpu(arguments.gpu)
    capability = gpu.compute_capability or (8, 0)

    traced = trace(training(arguments.batch, arguments.layers), capability=capability)

    step = traced.phase("step 1")
    for category, size in sorted(step.device_peak.categories.items(), key=lambda part: -part[1]):
        print(f"{category:16} {format_bytes(size)}")
    allocator = replay(traced, capability=capability)
    print(f"{'allocated':16} {format_bytes(allocator.peak_allocated_bytes)}")
    print(f"{'reserved':16} {format_bytes(allocator.peak_reserved_bytes)}")
    print(f"{'context':16} {format_bytes(gpu.context_bytes)}")
    if gpu.speeds is not None:
        operators = traced.operators[step.first_operator : step.end_operator]
        seconds = step_seconds((operator.work for operator in operators), gpu).seconds
        print(f"predicted time of a step: {seconds * 1000:.1f} ms on {gpu.name}")


if __name__ == "__main__":
    main()
