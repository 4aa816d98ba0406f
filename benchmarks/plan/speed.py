"""Duration and memory of ``autotune plan`` for Llama-3.1-8B's shape over the whole default space.

Run ``python -m benchmarks.plan.speed [--trainer dpo]``; it plans with an empty cache, again from it, and the
fastest candidate by itself with an empty one, and prints a Markdown table.
The model has weights that are never made, and a small tokenizer; what is cached goes to a temporary directory.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import run_autotune
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
        command = ["plan", str(model), "--seq-len", str(arguments.seq_len), "--gpu", arguments.gpu, "--all"]
        command += ["--trainer", arguments.trainer]
        for cache in ("empty", "filled"):
            found = _row("the whole space", cache, command, Path(folder, "cache"))
        fixed = [f"--fix={knob}={choice}" for knob, choice in found["estimates"][0]["candidate"].items()]
        _row("one candidate", "empty", [*command, *fixed], Path(folder, "other"))


def _row(what: str, cache: str, words: Sequence[str], cache_folder: Path) -> Any:
    ran = run_autotune(words, cache_folder)
    print(
        f"| {what} | {cache} | {ran.wall_seconds:.1f} s | {ran.processor_seconds:.1f} s "
        f"| {ran.largest_bytes >> 20} MiB | {len(ran.document['estimates'])} | {ran.document['new_trace_count']} |",
        flush=True,
    )
    return ran.document


if __name__ == "__main__":
    main()
