"""Time to the first ranking of ``autotune plan`` for an 8B shape with an empty cache, and that of imports alone.

Run ``python -m benchmarks.plan.first [--trainer dpo] [--repeats N]``; it prints a Markdown table. Each plan starts with
an empty cache and is stopped at its first ranking. Between two plans, one process imports what a server of traces
imports: the load of the machine changes both, and the ratio tells more than the seconds do.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.shapes import LLAMA_8B, write_model

_IMPORTS = """
from autotune.step.imports import prepare_environment, preload
prepare_environment("cpu", 1)
preload("cpu")
"""
_FIRST = "first ranking"


def main() -> None:
    """Plan until the first ranking, again and again, and print the table."""
    parser = argparse.ArgumentParser(description="Seconds to the first ranking of a plan.")
    parser.add_argument("--gpu", default="H100-80GB")
    parser.add_argument("--trainer", default="dpo", choices=sorted(_ROWS))
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model", LLAMA_8B)
        rows = folder / "rows.jsonl"
        rows.write_text("".join(_row(arguments.trainer, number) for number in range(400)), encoding="utf-8")
        words = ["plan", str(folder / "model"), str(rows), "--trainer", arguments.trainer, "--gpu", arguments.gpu]
        print("| run | imports of one process | first ranking | ratio |")
        print("|--:|--:|--:|--:|", flush=True)
        ratios = []
        for number in range(1, arguments.repeats + 1):
            imports = _seconds([sys.executable, "-c", _IMPORTS])
            ranking = _seconds([sys.executable, "-m", "autotune", *words], folder / str(number), _FIRST)
            ratios.append(ranking / imports)
            print(f"| {number} | {imports:.1f} s | {ranking:.1f} s | {ratios[-1]:.2f} |", flush=True)
        print(f"| median | | | {median(ratios):.2f} |")


_ROWS = {
    "sft": ("text",),
    "dpo": ("prompt", "chosen", "rejected"),
    "grpo": ("prompt",),
}
"""The columns of a trainer's rows."""


def _row(trainer: str, number: int) -> str:
    return (
        json.dumps({column: "word " * (5 + (7 * number + place) % 300) for place, column in enumerate(_ROWS[trainer])})
        + "\n"
    )


def _seconds(command: Sequence[str], cache: Path | None = None, until: str | None = None) -> float:
    """Return the time until a process ends or first writes to standard error, which ends it."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **({"XDG_CACHE_HOME": str(cache)} if cache else {})}
    started = time.monotonic()
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None
        said = next((line for line in process.stderr if until is not None and until in line), None)
        seconds = time.monotonic() - started
        if said is not None:
            process.send_signal(signal.SIGINT)
    if until is not None and said is None:
        raise SystemExit(f"{command} ended without saying {until!r}.")
    if until is None and process.returncode:
        raise SystemExit(f"{command} ended with exit status {process.returncode}.")
    return seconds


if __name__ == "__main__":
    main()
