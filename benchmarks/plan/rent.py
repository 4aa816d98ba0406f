"""How long the table of ``autotune plan --gpu all`` takes, compared with a plan for one GPU, each with an empty cache.

Run ``python -m benchmarks.plan.rent [--trainer dpo]``; it plans Llama-3.1-8B's shape over the whole default space on
one GPU, then on all of the catalogue, and prints a Markdown table with the ratios. Processor time is that of all
processes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

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
        command = ["plan", str(model), "--seq-len", str(arguments.seq_len), "--trainer", arguments.trainer, "--json"]
        single: tuple[float, float] | None = None
        for number, gpu in enumerate((arguments.gpu, "all")):
            wall, processor, traces = _measured([*command, "--gpu", gpu], Path(folder, f"cache-{number}"))
            single = single or (wall, processor)
            ratios = f"{wall / single[0]:.2f} | {processor / single[1]:.2f}"
            print(f"| --gpu {gpu} | {wall:.1f} s | {processor:.1f} s | {traces} | {ratios} |", flush=True)


def _measured(words: Sequence[str], cache: Path) -> tuple[float, float, int]:
    """Return wall seconds, processor seconds and the number of traces that were run."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "HF_HUB_OFFLINE": "1"}
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "autotune", *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    wall, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall, processor, int(json.loads(done.stdout)["new_trace_count"])


if __name__ == "__main__":
    main()
