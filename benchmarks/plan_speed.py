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

from tests.small import small_config, small_tokenizer

# https://huggingface.co/meta-llama/Llama-3.1-8B/blob/main/config.json
_LLAMA_8B = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
}


def main() -> None:
    """Plan twice and print the table."""
    parser = argparse.ArgumentParser(description="Speed of planning.")
    parser.add_argument("--gpu", default="H100-80GB")
    parser.add_argument("--seq-len", type=int, default=1024)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        small_config("llama", **_LLAMA_8B).save_pretrained(model)
        small_tokenizer().save_pretrained(model)
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
