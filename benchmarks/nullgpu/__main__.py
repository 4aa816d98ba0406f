"""Traces candidates whole and runs them on null GPUs: ``python -m benchmarks.nullgpu``, in PyTorch's CUDA build."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from autotune.nullgpu import environment, null_device

FOLDER = Path(__file__).parent


def main() -> int:
    """Run the cases that the file does not have yet, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=FOLDER / "results.jsonl")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="cases whose name has one of these words")
    parser.add_argument("--part", metavar="N/M", help="the Nth of M parts of the cases")
    parser.add_argument("--what", choices=("traced", "measured"), help="only traces, or only runs")
    asked = parser.parse_args()
    if "NULLGPU_DEVICE" not in os.environ:
        # PyTorch's CUDA build does not start without NVIDIA's libraries, or what stands in for them.
        words = [sys.executable, "-m", "benchmarks.nullgpu", *sys.argv[1:]]
        os.execve(sys.executable, words, environment(null_device("H100-80GB")))

    from autotune.planning.tracing.sources import digest_of
    from benchmarks.nullgpu.cases import cases
    from benchmarks.nullgpu.run import Record, run

    package = FOLDER.parents[1] / "autotune"
    patterns = ("*.py", "*.cpp", "*.h", "*.yaml")
    common = ("core", "step", "trainers", "techniques")
    sources = {
        "traced": digest_of(package, (*common, "virtual"), patterns),
        "measured": digest_of(package, (*common, "nullgpu"), patterns),
    }
    if asked.what:
        sources = {asked.what: sources[asked.what]}
    every = list(cases())
    wanted = [case for case in every if not asked.only or any(word in case.name for word in asked.only)]
    if asked.part:
        part, parts = map(int, asked.part.split("/"))
        wanted = wanted[part - 1 :: parts]
    run(wanted, Record(asked.results), sources)
    return 0


if __name__ == "__main__":
    sys.exit(main())
