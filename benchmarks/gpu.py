"""What a CUDA machine shows: the GPU-marked tests, then searches on the shapes of real models.

python benchmarks/gpu.py [--minutes 8] [--results DIRECTORY]

Needs no network and no weights: configurations and tokenizers are made on the spot, and rows are random tokens of
long-tailed lengths. Writes ``results/<device>-<date>.json`` with every trial, good or bad. It runs from a checkout with
whatever packages are there, so it can run where only torch and carried wheels exist; what is too old or missing is said
in one line. Ends with 0 when the tests pass and every search found something, 1 when not, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import autotune  # noqa: E402 - the checkout that this script lies in, installed or not
from autotune.core.codec import encode  # noqa: E402
from autotune.errors import AutotuneError  # noqa: E402
from autotune.inspection.machine import machine as inspect_machine  # noqa: E402
from autotune.units import format_bytes, format_duration, format_rate  # noqa: E402

_TESTS_SECONDS = 150
_ROWS = 512
# Median and spread of a log-normal that instruction datasets roughly follow: most rows are short, a few very long.
_MEDIAN_TOKENS, _SIGMA, _LONGEST_TOKENS = 350, 0.9, 4096


@dataclass(frozen=True)
class Shape:
    """The shape of a published model, as its config.json gives it, and what is asked of autotune.

    Attributes:
        share: of the time that is left after the tests.
    """

    name: str
    share: float
    config: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)


def _qwen(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, *, tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": 151936 if tied else 152064,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": tied,
        "eos_token_id": 0,
        "pad_token_id": 1,
    }


# From the models' own config.json files on the Hub: Qwen2.5-0.5B, Qwen2.5-1.5B and Qwen2.5-7B.
SHAPES = (
    Shape("qwen2.5-0.5b", 0.3, _qwen(896, 4864, 24, 14, 2, tied=True), {"global_batch_size": 16}),
    Shape("qwen2.5-1.5b", 0.3, _qwen(1536, 8960, 28, 12, 2, tied=True), {"global_batch_size": 16}),
    Shape("qwen2.5-7b-lora", 0.4, _qwen(3584, 18944, 28, 28, 4, tied=False), {"fix": {"lora": "r16"}}),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests and the searches, write the results, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="for everything (default: 8)")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="where to write")
    asked = parser.parse_args(arguments)
    end = time.monotonic() + 60 * asked.minutes - 20  # what writing and the last process's end may take
    try:
        machine = inspect_machine("cuda")
    except AutotuneError as error:
        print(f"benchmarks/gpu.py: {error}", file=sys.stderr)
        return 2
    tests = run_tests(min(_TESTS_SECONDS, (end - time.monotonic()) / 3))
    print(f"tests: {tests['summary']}", flush=True)
    shares = sum(shape.share for shape in SHAPES)
    left_seconds = end - time.monotonic()
    with tempfile.TemporaryDirectory(prefix="autotune-") as folder:
        searches = [search(shape, Path(folder), left_seconds * shape.share / shares) for shape in SHAPES]
    document = {
        "device": machine.hardware.name,
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "packages": dict(machine.packages),
        "driver": machine.hardware.driver,
        "tests": tests,
        "searches": searches,
    }
    file = asked.results / f"{re.sub(r'[^A-Za-z0-9]+', '-', machine.hardware.name)}-{document['date']}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {file}")
    return 0 if tests["passed"] and all(search["status"] == "found" for search in searches) else 1


def run_tests(seconds: float) -> dict[str, Any]:
    """Run the GPU-marked tests for so many seconds at the most; return whether they passed, and pytest's own words."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "--no-header", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"passed": False, "summary": f"not finished in {format_duration(seconds)}", "tail": ""}
    lines = done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or ["pytest said nothing"]
    return {"passed": done.returncode == 0, "summary": lines[-1], "tail": "\n".join(lines[-40:])}


def search(shape: Shape, folder: Path, seconds: float) -> dict[str, Any]:
    """Search for one shape for so many seconds and return its document, or why there is none."""
    model = write_model(folder / shape.name, shape.config)
    rows = write_rows(folder / "rows.jsonl", shape.config["vocab_size"])
    began = time.monotonic()
    try:
        result = autotune.probe(
            str(model),
            str(rows),
            device="cuda",
            effort="quick",
            timeout=max(30.0, seconds - 20),
            output=folder / f"out-{shape.name}",
            **shape.options,
        ).document
    except AutotuneError as error:
        print(f"{shape.name}: {error}", flush=True)
        return {"shape": shape.name, "status": "failed", "reason": str(error)}
    took = time.monotonic() - began
    chosen = result.recommended
    if chosen is None:
        print(f"{shape.name}: {result.status.value} after {format_duration(took)}", flush=True)
    else:
        rate, peak = chosen.tokens_per_second or 0.0, chosen.peak_bytes or 0
        speedup = f", {result.speedup:.2f}x TRL's default" if result.speedup else ""
        print(f"{shape.name}: {format_rate(rate)}, {format_bytes(peak)}{speedup}, {format_duration(took)}", flush=True)
    return {"shape": shape.name, "status": result.status.value, "seconds": took, "result": encode(result)}


def write_model(directory: Path, config: dict[str, Any]) -> Path:
    """Write a configuration and a small tokenizer, and return the directory."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    tokenizer = Tokenizer(models.WordLevel({"<end>": 0, "<pad>": 1, "<unknown>": 2}, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")
    wrapped.save_pretrained(directory)
    return directory


def write_rows(file: Path, vocabulary: int) -> Path:
    """Write rows of random tokens whose lengths are long-tailed, and return the file."""
    source = random.Random(0)
    with file.open("w", encoding="utf-8") as lines:
        for _ in range(_ROWS):
            length = min(_LONGEST_TOKENS, max(16, round(_MEDIAN_TOKENS * source.lognormvariate(0, _SIGMA))))
            lines.write(json.dumps({"input_ids": [source.randrange(3, vocabulary) for _ in range(length)]}) + "\n")
    return file


if __name__ == "__main__":
    sys.exit(main())
