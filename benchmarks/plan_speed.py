"""How long ``autotune plan`` takes for Llama-3.1-8B's shape over the whole default space, and how much memory it uses.

Run ``python benchmarks/plan_speed.py``; it plans twice, with an empty cache and from it, and prints a Markdown table.
The model has weights that are never made, and a small tokenizer; what is cached goes to a temporary directory.
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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.shapes import LLAMA_8B, write_model


def main() -> None:
    """Plan twice and print the table."""
    parser = argparse.ArgumentParser(description="Speed of planning.")
    parser.add_argument("--gpu", default="H100-80GB")
    parser.add_argument("--seq-len", type=int, default=1024)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        write_model(model, LLAMA_8B)
        print("| cache | wall | processor | largest process | candidates | traces run |")
        print("|---|--:|--:|--:|--:|--:|", flush=True)
        for cache in ("empty", "filled"):
            _row(cache, folder, model, arguments.gpu, arguments.seq_len)


def _row(cache: str, folder: str, model: Path, gpu: str, tokens: int) -> None:
    command = [sys.executable, "-m", "autotune", "plan", str(model), "--seq-len", str(tokens), "--gpu", gpu, "--json"]
    environment = {**os.environ, "XDG_CACHE_HOME": folder, "HF_HUB_OFFLINE": "1"}
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=False)
    wall_seconds, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    found = json.loads(done.stdout)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(
        f"| {cache} | {wall_seconds:.1f} s | {seconds:.1f} s | {after.ru_maxrss / 1024:.0f} MiB "
        f"| {len(found['estimates'])} | {found['new_trace_count']} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
