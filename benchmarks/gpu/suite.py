"""Runs the suite of a CUDA machine: GPU tests, predictions against measurements, and searches on real shapes.

python -m benchmarks.gpu.suite [--minutes 9] [--parts tests predicted searches] [--results DIRECTORY] [--untraced]

Tests run while predictions are traced, for nothing of that is timed; probes and searches then run alone.
Needs no network and no weights: configurations and tokenizers are made on the spot, and rows are random tokens. Writes
``results/<device>-<date>.json`` with the tests and every trial of the searches, good or bad, and
``<device>-<date>-predicted.json`` and ``.md`` with every case that was predicted and measured. All are written as soon
as there is something to write, so that a kill loses only what was running. Files of a null GPU begin with ``null-``;
their times are left out or marked. It runs from a checkout with whatever packages are there, so it can run where only
torch and carried wheels exist; what is too old or missing is said in one line. Ends with 0 when all went well (the
tests passed, something was measured, and every search found something), 1 when not, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import autotune
from autotune.core.files.codec import encode
from autotune.core.machine import DeviceKind
from autotune.errors import AutotuneError
from autotune.inspection.machine import machine as inspect_machine
from autotune.units import format_bytes, format_duration, format_rate
from benchmarks.gpu.cases import CASES, SCENARIOS
from benchmarks.gpu.predicted import compare
from benchmarks.pictured import SHAPES
from benchmarks.shapes import CONFIGURATIONS, write_model, write_rows

ROOT = Path(__file__).resolve().parents[2]
NO_TIMES = "This is a null GPU, whose kernels do nothing: all times and speeds in this document mean nothing."
PARTS = ("tests", "predicted", "searches")
# Of all the time.
_TESTS_SHARE = 0.25
# Of what the tests leave, where searches follow.
_PREDICTED_SHARE = 0.6
# Time for the end of the last process and the last writing.
_ENDING_SECONDS = 20
# Of pytest: a test of the suite mostly waits for a process that starts.
_WORKERS = ("--numprocesses", str(min(14, max(1, (os.cpu_count() or 1) - 2))), "--dist", "worksteal")
_ROWS = 512
# Median and spread of a log-normal that instruction datasets roughly follow: most rows are short, a few very long.
_MEDIAN_TOKENS, _SIGMA, _LONGEST_TOKENS = 350, 0.9, 4096


@dataclass(frozen=True)
class Search:
    """A search on the shape of a published model.

    Attributes:
        shape: name of its configuration.
        share: of the time that all searches have.
        options: what is asked of autotune.
    """

    name: str
    shape: str
    share: float
    options: Mapping[str, Any]


SEARCHES = (
    Search("qwen2.5-0.5b", "qwen2.5-0.5b", 0.3, {"global_batch_size": 16}),
    Search("qwen2.5-1.5b", "qwen2.5-1.5b", 0.3, {"global_batch_size": 16}),
    Search("qwen2.5-7b-lora", "qwen2.5-7b", 0.4, {"fix": {"lora": "r16"}}),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts, write their results, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything (default: 9)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to run (default: all)")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "gpu" / "results", help="where to write")
    parser.add_argument(
        "--untraced", action="store_true", help="predict nothing, and first measure what no page of results has"
    )
    asked = parser.parse_args(arguments)
    end = time.monotonic() + 60 * asked.minutes - _ENDING_SECONDS
    try:
        machine = inspect_machine("cuda")
    except AutotuneError as error:
        print(f"benchmarks.gpu.suite: {error}", file=sys.stderr)
        return 2
    hardware, date = machine.hardware, dt.datetime.now(tz=dt.UTC).date().isoformat()
    stem = f"{'null-' * hardware.is_null}{re.sub(r'[^A-Za-z0-9]+', '-', hardware.name)}-{date}"
    asked.results.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {
        "device": hardware.name, "null_gpu": hardware.is_null, "date": date, "packages": dict(machine.packages),
        "driver": hardware.driver,
    }  # fmt: skip
    if hardware.is_null:
        document["note"] = NO_TIMES
        print(NO_TIMES, flush=True)
    good = True
    with ThreadPoolExecutor(1) as beside:
        seconds = end - time.monotonic()
        tests = beside.submit(run_tests, seconds * _TESTS_SHARE) if "tests" in asked.parts else None
        if "predicted" in asked.parts:
            share = _PREDICTED_SHARE if "searches" in asked.parts else 1.0
            file = asked.results / f"{stem}-predicted.json"
            first = [tests] if tests is not None else []
            good = run_predicted("cuda", file, seconds * share, first, traced=not asked.untraced)
    if tests is not None:
        document["tests"] = tests.result()
        good = write(asked.results / f"{stem}.json", document) and tests.result()["passed"] and good
        print(f"tests: {tests.result()['summary']}", flush=True)
    if "searches" in asked.parts:
        document["searches"] = []
        for found in run_searches("cuda", end):
            document["searches"].append(found)
            good = write(asked.results / f"{stem}.json", document) and found["status"] == "found" and good
    return 0 if good else 1


def write(file: Path, document: Mapping[str, Any]) -> bool:
    """Write a document, print its place, and return True."""
    file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {file}", flush=True)
    return True


def run_tests(seconds: float) -> dict[str, Any]:
    """Run the GPU-marked tests with a time limit in seconds; return whether they passed, and pytest's summary."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "--no-header", "-p", "no:cacheprovider", *_WORKERS]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as running:
        try:
            said, _ = running.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            # All processes that it started: they would disturb the next measurements.
            for process in [*psutil.Process(running.pid).children(recursive=True), psutil.Process(running.pid)]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            said, _ = running.communicate()
            summary = f"not finished in {format_duration(seconds)}"
            return {"passed": False, "summary": summary, "tail": _tail(said.splitlines())}
    lines = said.strip().splitlines() or ["pytest said nothing"]
    return {"passed": running.returncode == 0, "summary": lines[-1], "tail": _tail(lines)}


def _tail(lines: Sequence[str]) -> str:
    return "\n".join(lines[-80:])


def run_predicted(
    device: DeviceKind, file: Path, seconds: float, first: Sequence[Future[Any]] = (), *, traced: bool = True
) -> bool:
    """Hold predictions against measurements, and return whether anything was measured.

    Args:
        first: what ends before anything is measured.
        traced: whether to predict; if not, cases come first that no page beside the file has.
    """
    known = frozenset() if traced else _measured_beside(file)
    cases = sorted(CASES, key=lambda case: case.name in known)
    try:
        outcomes = compare(device, SHAPES, SCENARIOS, cases, file, seconds, first, traced=traced)
    except AutotuneError as error:
        print(f"predicted: {error}", flush=True)
        return False
    measured = [outcome for outcome in outcomes if outcome.measured is not None]
    print(f"predicted: {len(measured)} of {len(outcomes)} cases were measured", flush=True)
    print(f"wrote {file} and {file.with_suffix('.md')}", flush=True)
    return bool(measured)


def _measured_beside(file: Path) -> frozenset[str]:
    """Return the names of the cases that GPUs have measured, by the documents in the folder of a file."""
    documents = [json.loads(each.read_text(encoding="utf-8")) for each in file.parent.glob("NVIDIA-*-predicted.json")]
    return frozenset(case["name"] for document in documents for case in document["cases"] if case.get("measured"))


def run_searches(device: DeviceKind, end: float) -> Iterator[dict[str, Any]]:
    """Yield each search's document, or why there is none; all end by a time on the clock of :func:`time.monotonic`."""
    left_seconds = end - time.monotonic()
    shares = sum(search.share for search in SEARCHES)
    with tempfile.TemporaryDirectory(prefix="autotune-") as folder:
        for search in SEARCHES:
            yield run_search(device, search, Path(folder), left_seconds * search.share / shares)


def run_search(device: DeviceKind, search: Search, folder: Path, seconds: float) -> dict[str, Any]:
    """Search for one shape with a time limit in seconds; return the document, or why there is none."""
    configuration = CONFIGURATIONS[search.shape]
    model = write_model(folder / search.name, configuration)
    rows = write_rows(folder / "rows.jsonl", long_tailed_lengths(), configuration["vocab_size"])
    began = time.monotonic()
    try:
        result = autotune.probe(
            str(model),
            str(rows),
            device=device,
            effort="quick",
            timeout=max(30.0, seconds - 20),
            output=folder / f"out-{search.name}",
            **search.options,
        ).document
    except AutotuneError as error:
        print(f"{search.name}: {error}", flush=True)
        return {"shape": search.name, "status": "failed", "reason": str(error)}
    took = time.monotonic() - began
    chosen = result.recommended
    if chosen is None:
        print(f"{search.name}: {result.status.value} after {format_duration(took)}", flush=True)
    else:
        shown = [format_bytes(chosen.peak_bytes or 0)]
        if not result.hardware.is_null:
            shown.append(format_rate(chosen.tokens_per_second or 0.0))
            shown += [f"{result.speedup:.2f}x TRL's default"] if result.speedup else []
        print(f"{search.name}: {', '.join(shown)}, {format_duration(took)}", flush=True)
    return {"shape": search.name, "status": result.status.value, "seconds": took, "result": encode(result)}


def long_tailed_lengths() -> Iterator[int]:
    """Yield the tokens of each row."""
    source = random.Random(0)
    for _ in range(_ROWS):
        yield min(_LONGEST_TOKENS, max(16, round(_MEDIAN_TOKENS * source.lognormvariate(0, _SIGMA))))


if __name__ == "__main__":
    sys.exit(main())
