"""How long ``autotune plan`` takes for Llama-3.1-8B's shape over the whole default space, and how much memory it uses.

Run ``python -m benchmarks.plan.speed [--trainer dpo]``; it plans with an empty cache, again from it, and the
fastest candidate by itself with an empty one, and prints a Markdown table.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.shapes import LLAMA_8B, write_model


def main() -> None:
    """Plan twice and print the table."""
    parser = argparse.ArgumentParser(description="Speed of planning.")
    parser.add_argument("--gpu", default="H100-80GB")
    parser.add_argument("--trainer", default="sft")
    parser.add_argument("--seq-len", type=int, default=1024)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        write_model(model, LLAMA_8B)
        print("| what | cache | wall | processor | largest process | candidates | traces run |")
        print("|---|---|--:|--:|--:|--:|--:|", flush=True)
        command = ["plan", str(model), "--seq-len", str(arguments.seq_len), "--gpu", arguments.gpu, "--json", "--all"]
        command += ["--trainer", arguments.trainer]
        for cache in ("empty", "filled"):
            found = _row("the whole space", cache, command, Path(folder, "cache"))
        fixed = [f"--fix={knob}={choice}" for knob, choice in found["estimates"][0]["candidate"].items()]
        _row("one candidate", "empty", [*command, *fixed], Path(folder, "other"))


def _row(what: str, cache: str, words: Sequence[str], cache_folder: Path) -> Any:
    command = [sys.executable, "-m", "autotune", *words]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache_folder), "HF_HUB_OFFLINE": "1"}
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=False)
    wall_seconds, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    found = json.loads(done.stdout)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(
        f"| {what} | {cache} | {wall_seconds:.1f} s | {seconds:.1f} s | {after.ru_maxrss / 1024:.0f} MiB "
        f"| {len(found['estimates'])} | {found['new_trace_count']} |",
        flush=True,
    )
    return found


if __name__ == "__main__":
    main()
