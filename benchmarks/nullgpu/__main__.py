"""Traces candidates whole, trains them on null GPUs, and writes the comparison.

Run ``.venv-cuda/bin/python -m benchmarks.nullgpu``: it needs PyTorch's CUDA build, and no GPU. What a file has already,
from the same sources, is not run again.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from autotune.planning.tracing.cache import digest_of
from benchmarks.common import chosen, start_on_null_gpu

FOLDER = Path(__file__).parent
_PATTERNS = ("*.py", "*.cpp", "*.h", "*.yaml")


def main() -> int:
    """Run the cases that the file does not have yet, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=FOLDER / "results.jsonl", help="where rows are kept")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="cases whose name has one of these words")
    parser.add_argument("--part", metavar="N/M", help="the Nth of M parts of the cases, for several processes")
    parser.add_argument("--what", choices=("traced", "measured"), help="only traces, or only runs")
    parser.add_argument("--page", action="store_true", help="only write the page from the file")
    asked = parser.parse_args()
    if not asked.page:
        # Transformers places random weights in the order of a set of names: in all processes the same one.
        start_on_null_gpu("benchmarks.nullgpu", "H100-80GB", {"PYTHONHASHSEED": "0"})

    from benchmarks.nullgpu.cases import cases
    from benchmarks.nullgpu.page import page
    from benchmarks.nullgpu.record import Record

    every, record = list(cases()), Record(asked.results)
    if not asked.page:
        from autotune.inspection.machine import machine
        from benchmarks.nullgpu.run import run

        wanted = chosen(every, asked.only)
        if asked.part:
            part, parts = map(int, asked.part.split("/"))
            wanted = wanted[part - 1 :: parts]
        run(wanted, record, _sources(asked.what))
        record.keep((case.name for case in every), machine("cpu").packages)
    asked.results.with_name("nullgpu.md").write_text(page(every, record.rows, record.about), encoding="utf-8")
    return 0


def _sources(what: str | None) -> dict[str, str]:
    """Return hashes of the sources on which a trace and a run of a case depend."""
    package = FOLDER.parents[1] / "autotune"
    common = ("core", "step", "trainers", "techniques")
    found = {
        "measured": digest_of(package, (*common, "nullgpu"), _PATTERNS),
        "traced": digest_of(package, (*common, "virtual"), _PATTERNS),
    }
    return {name: digest for name, digest in found.items() if what in (None, name)}


if __name__ == "__main__":
    sys.exit(main())
