"""Compare the simulated caching allocator with PyTorch's own on a CUDA device.

Small training runs are recorded with PyTorch's memory history; the same requests are replayed through the simulator,
and reserved memory is compared at every event.

Usage: python -m benchmarks.gpu.allocator [--output results.json]

Ends with status 1 where the two differ by more than --tolerance of the peak. Without a CUDA device it says so and
compares nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import random
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autotune.virtual.allocator.blocks import Block
from autotune.virtual.allocator.caching import CachingAllocator

HISTORY_ENTRIES = 2_000_000


@dataclass(frozen=True)
class Comparison:
    """What the simulator said of a recorded sequence, beside what PyTorch did. Sizes are bytes.

    Attributes:
        case: name of the run.
        expandable_segments: whether it was recorded with them.
        events: allocations and frees that were replayed.
        measured_peak_allocated, simulated_peak_allocated: the most that tensors held.
        measured_peak_reserved, simulated_peak_reserved: the most that the allocator held.
        worst_difference_reserved: the largest difference in reserved memory after any event.
    """

    case: str
    expandable_segments: bool
    events: int
    measured_peak_allocated: int
    simulated_peak_allocated: int
    measured_peak_reserved: int
    simulated_peak_reserved: int
    worst_difference_reserved: int

    @property
    def error(self) -> float:
        """The worst difference, or that of the allocated peaks if it is larger, as a share of the measured peak."""
        allocated = abs(self.measured_peak_allocated - self.simulated_peak_allocated)
        return max(self.worst_difference_reserved, allocated) / max(1, self.measured_peak_reserved)


def compare(case: str, history: Iterable[Mapping[str, Any]], *, peak_allocated: int, expandable: bool) -> Comparison:
    """Replay a recorded history that began with an empty allocator.

    Args:
        case: name of the run.
        history: entries of one device in ``torch.cuda.memory._snapshot()["device_traces"]``.
        peak_allocated: ``allocated_bytes.all.peak`` of ``torch.cuda.memory_stats``; the history has requests only.
        expandable: whether it was recorded with expandable segments.
    """
    simulated = CachingAllocator(expandable_segments=expandable)
    blocks: dict[int, Block] = {}
    reserved = peak_reserved = worst = events = 0
    for entry in history:
        action, size = entry["action"], entry["size"]
        if action in ("segment_alloc", "segment_map"):
            reserved += size
            peak_reserved = max(peak_reserved, reserved)
        elif action in ("segment_free", "segment_unmap"):
            reserved -= size
        elif action == "alloc":
            blocks[entry["addr"]] = simulated.allocate(size, stream=entry["stream"])
        elif action == "free_completed":
            # From here on the memory can be reused; the request to free it may have waited for other streams.
            simulated.free(blocks.pop(entry["addr"]))
        else:
            continue
        if action in ("alloc", "free_completed"):
            events += 1
            worst = max(worst, abs(reserved - simulated.reserved_bytes))
    return Comparison(
        case=case,
        expandable_segments=expandable,
        events=events,
        measured_peak_allocated=peak_allocated,
        simulated_peak_allocated=simulated.peak_allocated_bytes,
        measured_peak_reserved=peak_reserved,
        simulated_peak_reserved=simulated.peak_reserved_bytes,
        worst_difference_reserved=worst,
    )


def training(lengths: tuple[int, ...], *, checkpointing: bool) -> Callable[[], None]:
    """Return a run of AdamW steps of a small transformer in bfloat16, one batch of four for each length."""

    def run() -> None:
        import torch
        from torch.utils.checkpoint import checkpoint

        torch.manual_seed(0)
        layers = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True, dropout=0.0) for _ in range(8)
        ).to("cuda")
        head = torch.nn.Linear(1024, 32_000, bias=False, device="cuda")
        optimizer = torch.optim.AdamW([*layers.parameters(), *head.parameters()], lr=1e-4)
        for length in lengths:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                hidden = torch.randn(4, length, 1024, device="cuda")
                for layer in layers:
                    hidden = checkpoint(layer, hidden, use_reentrant=False) if checkpointing else layer(hidden)
                labels = torch.randint(0, 32_000, (4 * length,), device="cuda")
                loss = torch.nn.functional.cross_entropy(head(hidden).flatten(0, 1).float(), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return run


def random_tensors() -> None:
    """Allocate and free tensors of every size class in a random order."""
    import torch

    rng = random.Random(0)
    live: list[torch.Tensor] = []
    for _ in range(20_000):
        if live and rng.random() < 0.48:
            live.pop(rng.randrange(len(live)))
        else:
            live.append(torch.empty(int(2 ** rng.uniform(0, 25)), dtype=torch.uint8, device="cuda"))


CASES: Mapping[str, Callable[[], None]] = {
    "random sizes": random_tensors,
    "training, one length": training((512,) * 4, checkpointing=False),
    "training, lengths that vary": training((128, 512, 300, 700, 513, 64, 700), checkpointing=False),
    "training, checkpointing": training((512, 700, 512, 300), checkpointing=True),
}


def record(case: str, expandable: bool, results: Any) -> None:
    """Run a case in this fresh process, record it, and put the comparison on ``results``."""
    import torch

    torch.cuda.memory._set_allocator_settings(f"expandable_segments:{expandable}")
    torch.cuda.init()
    torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=HISTORY_ENTRIES)
    CASES[case]()
    torch.cuda.synchronize()
    gc.collect()
    history = torch.cuda.memory._snapshot()["device_traces"][0]
    peak_allocated = torch.cuda.memory_stats()["allocated_bytes.all.peak"]
    results.put(compare(case, history, peak_allocated=peak_allocated, expandable=expandable))


def main() -> int:
    """Compare every case with and without expandable segments, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write the comparisons there as JSON")
    parser.add_argument("--tolerance", type=float, default=0.005, help="share of the peak (default: %(default)s)")
    arguments = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("There is no CUDA device here: nothing was compared.")
        return 0
    context, found = multiprocessing.get_context("spawn"), []
    for case in CASES:
        for expandable in (False, True):
            results = context.Queue()
            process = context.Process(target=record, args=(case, expandable, results))
            process.start()
            found.append(results.get(timeout=300))
            process.join()
            print(f"{found[-1].error:8.3%}  {found[-1]}")
    if arguments.output:
        document = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        document["cases"] = [{**asdict(comparison), "error": comparison.error} for comparison in found]
        arguments.output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return int(any(comparison.error > arguments.tolerance for comparison in found))


if __name__ == "__main__":
    sys.exit(main())
