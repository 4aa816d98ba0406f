"""Duration and result of ``autotune plan`` for a large model on several GPUs, with an empty cache.

Run ``python -m benchmarks.plan.devices [--shape 70b] [--num-processes 32]``; it plans over sharding, offload,
checkpointing, Liger and the batch with an empty cache, again from the cache to show the plan, and prints a row.
Processor time is that of all processes; half of it is what the plan takes at least on two cores.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.common import run_autotune, with_cache
from benchmarks.shapes import LLAMA_8B, LLAMA_70B, write_model

_SHAPES = {"8b": LLAMA_8B, "70b": LLAMA_70B}
_SPACE = """\
trainer: sft
techniques:
  sharding: [ddp, zero1, zero2, zero3, fsdp2]
  offload: [none, optimizer, parameters, both]
  gradient_checkpointing: ["on", "off"]
  liger: ["off", "on"]
  per_device_train_batch_size: [1, 2, 4, 8, 16]
"""


def main() -> None:
    """Plan, and print how long it took, how much was traced, and the best candidates."""
    parser = argparse.ArgumentParser(description="Speed of a plan for several GPUs.")
    parser.add_argument("--shape", default="8b", choices=sorted(_SHAPES))
    parser.add_argument("--gpu", default="H100-80GB")
    parser.add_argument("--num-processes", type=int, default=8)
    parser.add_argument("--num-machines", type=int)
    parser.add_argument("--network", type=float, help="Gbit/s of each machine")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--documents", type=int, default=4, help="per process and optimizer step")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_model(folder / "model", _SHAPES[arguments.shape])
        space = folder / "space.yaml"
        space.write_text(_SPACE, encoding="utf-8")
        words = ["plan", str(model), "--gpu", arguments.gpu, "--space", str(space),
                 "--num-processes", str(arguments.num_processes), "--seq-len", str(arguments.seq_len),
                 "--global-batch-size", str(arguments.documents * arguments.num_processes)]  # fmt: skip
        if arguments.num_machines is not None:
            words += ["--num-machines", str(arguments.num_machines)]
        if arguments.network is not None:
            words += ["--network", str(arguments.network)]
        ran = run_autotune([*words, "--all"], folder / "cache")
        subprocess.run([sys.executable, "-m", "autotune", *words], env=with_cache(folder / "cache"), check=False)
    plan, processor = ran.document, ran.processor_seconds
    print()
    print("| shape | processes | candidates | traces | wall | processor | half of it |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    print(f"| {arguments.shape} | {arguments.num_processes} | {len(plan['estimates'])} | {plan['new_trace_count']} | "
          f"{ran.wall_seconds:.0f} s | {processor:.0f} s | {processor / 2:.0f} s |")  # fmt: skip


if __name__ == "__main__":
    main()
