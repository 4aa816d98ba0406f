"""Duration of the table of ``autotune plan --gpu all`` and of a plan for one GPU, each with an empty cache.

Run ``python -m benchmarks.plan.rent [--trainer dpo]``; it plans Llama-3.1-8B's shape over the whole default space on
one GPU, then on all of the catalogue, and prints a Markdown table with the ratios. Processor time is that of all
processes.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.common import run_autotune
from benchmarks.shapes import LLAMA_8B, write_model


def main() -> None:
    """Plan, compare, and print the table."""
    parser = argparse.ArgumentParser(description="Speed of the table of GPUs.")
    parser.add_argument("--gpu", default="H100-80GB")
    parser.add_argument("--trainer", default="sft")
    parser.add_argument("--seq-len", type=int, default=1024)
    arguments = parser.parse_args()
    print("| what | wall | processor | traces run | wall / one plan | processor / one plan |")
    print("|---|--:|--:|--:|--:|--:|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder, "model"), LLAMA_8B)
        command = ["plan", str(model), "--seq-len", str(arguments.seq_len), "--trainer", arguments.trainer]
        single: tuple[float, float] | None = None
        for number, gpu in enumerate((arguments.gpu, "all")):
            ran = run_autotune([*command, "--gpu", gpu], Path(folder, f"cache-{number}"))
            wall, processor = ran.wall_seconds, ran.processor_seconds
            single = single or (wall, processor)
            ratios = f"{wall / single[0]:.2f} | {processor / single[1]:.2f}"
            traces = ran.document["new_trace_count"]
            print(f"| --gpu {gpu} | {wall:.1f} s | {processor:.1f} s | {traces} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
