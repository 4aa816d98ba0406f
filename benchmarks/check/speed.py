"""Duration of ``autotune check`` for an 8B shape with LoRA and 2,000 tokenised rows, with a cache and without.

Run ``python -m benchmarks.check.speed``; it prints a Markdown table. The model has weights that are never made, and
what is cached goes to a temporary directory.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path

from benchmarks.common import run_autotune
from benchmarks.shapes import LLAMA_8B, write_model

_ROWS = 2000
_CONFIGURATION = """\
model_name_or_path: {model}
datasets: [{{path: json, data_files: {rows}}}]
output_dir: out
max_length: 2048
per_device_train_batch_size: 4
gradient_accumulation_steps: 4
use_peft: true
lora_r: 32
dtype: bfloat16
"""


def main() -> None:
    """Check twice and print the table."""
    parser = argparse.ArgumentParser(description="Speed of checking.")
    parser.add_argument("--gpu", default="H100-80GB")
    gpu = parser.parse_args().gpu
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model", LLAMA_8B)
        rows = folder / "rows.jsonl"
        rows.write_text("".join(f"{json.dumps(row)}\n" for row in _rows()), encoding="utf-8")
        file = folder / "config.yaml"
        file.write_text(_CONFIGURATION.format(model=folder / "model", rows=rows), encoding="utf-8")
        print("| cache | wall | verdict |")
        print("|---|--:|---|", flush=True)
        for cache in ("empty", "filled"):
            ran = run_autotune(["check", str(file), "--trainer", "sft", "--gpu", gpu], folder / "cache")
            print(f"| {cache} | {ran.wall_seconds:.1f} s | {ran.document['headline']} |", flush=True)


def _rows() -> list[dict[str, list[int]]]:
    drawn = random.Random(1)
    lengths = [min(4000, max(20, int(drawn.lognormvariate(6, 0.8)))) for _ in range(_ROWS)]
    return [{"input_ids": [drawn.randrange(1000) for _ in range(length)]} for length in lengths]


if __name__ == "__main__":
    main()
