"""Repeats the predictions for recorded measurements of a GPU with the present source; no GPU is needed.

python -m benchmarks.gpu.again benchmarks/gpu/results/NVIDIA-H200-2026-11-26-predicted.json [--minutes 20] [--only 4bit]

Run it with the versions of torch and transformers that the page names. Writes the document and its page in their place.
With ``--only`` other configurations keep their predictions.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path

from autotune.app.planned import planned_machine
from autotune.core.files.codec import decode, encode
from autotune.planning.tracing.cache import Cache
from benchmarks.common import chosen
from benchmarks.gpu.accuracy import Outcome, Prediction
from benchmarks.gpu.accuracy_report import page
from benchmarks.gpu.cases import CASES, SCENARIOS, Case
from benchmarks.gpu.predictions import predict, predict_measured
from benchmarks.gpu.prepared import on_host, prepare
from benchmarks.gpu.trace_pool import TracePool
from benchmarks.pictured import SHAPES


def predicted_again(
    gpu: str,
    cases: Sequence[Case],
    operators: Mapping[str, float | None],
    seconds: float,
    launch_seconds: float | None = None,
) -> dict[str, dict[str, Prediction | str]]:
    """Return the predictions of cases, or why there is none, by case and kind.

    Args:
        operators: seconds of operators that ran on that GPU, by call.
        launch_seconds: the host's time for one operator there; None: it was not measured.
    """
    found: dict[str, dict[str, Prediction | str]] = {case.name: {} for case in cases}
    machine = on_host(planned_machine(gpu), launch_seconds)
    wanted = [scenario for scenario in SCENARIOS if any(case.scenario == scenario.name for case in cases)]

    def tell(case: Case, kind: str, told: Prediction | str) -> None:
        found[case.name][kind] = told

    def measure(calls: Sequence[str]) -> Mapping[str, float | None]:
        return {call: operators[call] for call in calls if call in operators}

    with (
        tempfile.TemporaryDirectory(prefix="autotune-") as directory,
        TracePool(machine.hardware.cores, time.monotonic() + seconds) as pool,
    ):
        folder = Path(directory)
        preparing = {one.name: pool.submit(partial(prepare, one, SHAPES, machine)) for one in wanted}
        prepared = {name: future.result() for name, future in preparing.items()}
        predict(pool, prepared, cases, folder / "cache", tell)
        for name, where in prepared.items():
            mine = [case for case in cases if case.scenario == name]
            if operators:
                predict_measured(where, mine, folder / "cache" / name, measure, Cache(folder / "measured"), tell)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Predict again, write, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="document of a comparison")
    parser.add_argument("--minutes", type=float, default=20.0, help="for all traces (default: 20)")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="of configurations whose name has one of these")
    asked = parser.parse_args(arguments)
    document = json.loads(asked.file.read_text(encoding="utf-8"))
    measured = asked.file.with_name(f"{asked.file.stem}-operators.json")
    times = json.loads(measured.read_text(encoding="utf-8")) if measured.exists() else {}
    outcomes = [decode(Outcome, case) for case in document["cases"]]
    names = {outcome.name for outcome in outcomes if outcome.measured is not None}
    cases = [case for case in chosen(CASES, asked.only) if case.name in names]
    seconds = {call: one["seconds"] for call, one in times.items()}
    host = document.get("launch_seconds")
    found = predicted_again(document["device"], cases, seconds, 60 * asked.minutes, host)
    outcomes = [_with(one, found[one.name]) if one.name in found or not asked.only else one for one in outcomes]
    document["cases"] = [encode(outcome) for outcome in outcomes]
    asked.file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    place = asked.file.with_suffix(".md")
    title, about = head_of(place.read_text(encoding="utf-8"))
    place.write_text(page(title, list(dict.fromkeys([*about, _ANEW])), outcomes, times), encoding="utf-8")
    print(f"wrote {asked.file} and {place}")
    return 0


_ANEW = "Predictions are of a later source than probes: `benchmarks/gpu/again.py` made them."


def head_of(page_text: str) -> tuple[str, list[str]]:
    """Return the title of a page, and its sentences on how it was measured."""
    title, _, *lines = page_text.split("\n")
    return title.removeprefix("# "), list(takewhile(lambda line: " configurations: " not in line, lines))


def _with(outcome: Outcome, told: Mapping[str, Prediction | str]) -> Outcome:
    """Return an outcome with other predictions, or the reasons why there are none."""
    predictions = {kind: one for kind, one in told.items() if isinstance(one, Prediction)}
    reasons = {kind: one for kind, one in told.items() if isinstance(one, str)}
    measured = {kind: reason for kind, reason in outcome.reasons.items() if kind == "measured"}
    return replace(outcome, predictions=predictions, reasons=measured | reasons)


if __name__ == "__main__":
    sys.exit(main())
