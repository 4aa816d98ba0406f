"""Whether a recommendation keeps its promise: its ``train.py`` over real steps, from outside of autotune.

python benchmarks/promise.py BUNDLE [--steps 200]

BUNDLE is the output directory of ``autotune probe``. Its ``train.py`` runs unchanged in a process of its own. Tokens
per second come from TRL's own count of tokens and the clock at each logged step; the peak from the process itself.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.units import format_bytes, format_rate

# Steps that are left out at the start, where caches fill and kernels are chosen.
_SETTLING_STEPS = 10
_TOKENS = re.compile(r"'num_tokens': '?([0-9.e+]+)")
_PEAK = "PEAK "
# Runs in the training process: the baseline is taken after the imports, as in a probe.
_RUNNER = """
import runpy, sys
from autotune.step.imports import prepare_environment, preload
device = sys.argv.pop(1)
prepare_environment(device)
preload(device)
from autotune.step.meters import METERS
meter = METERS[device]()
script = sys.argv.pop(1)
sys.argv[0] = script
runpy.run_path(script, run_name="__main__")
print("PEAK", meter.peaks().peak_bytes, flush=True)
"""


@dataclass(frozen=True)
class Kept:
    """What a real run showed: tokens per second after settling, and its peak in bytes."""

    tokens_per_second: float
    peak_bytes: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print promised against real, and return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path, help="output directory of `autotune probe`")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps (default: 200)")
    asked = parser.parse_args(arguments)
    result = json.loads((asked.bundle / "result.json").read_text(encoding="utf-8"))
    promised = result["recommended"]
    if promised is None:
        parser.error(f"{asked.bundle} holds no recommendation")
    real = train(asked.bundle / "train.py", result["hardware"]["kind"], asked.steps)
    print(f"{result['hardware']['name']}, {asked.steps} steps of {asked.bundle / 'train.py'}")
    rate, peak = promised["tokens_per_second"], promised["peak_bytes"]
    print(f"  tokens/s  promised {format_rate(rate)}, real {format_rate(real.tokens_per_second)}, "
          f"real / promised {real.tokens_per_second / rate:.3f}")  # fmt: skip
    print(f"  peak      promised {format_bytes(peak)}, real {format_bytes(real.peak_bytes)}, "
          f"real / promised {real.peak_bytes / peak:.3f}")  # fmt: skip
    return 0


def train(script: Path, device: str, steps: int) -> Kept:
    """Run a bundle's script for so many steps and return what it showed."""
    with tempfile.TemporaryDirectory(prefix="autotune-") as folder:
        command = [sys.executable, "-c", _RUNNER, device, str(script.resolve())]
        command += [
            "--max_steps",
            str(steps),
            "--logging_steps",
            "1",
            "--save_strategy",
            "no",
            "--disable_tqdm",
            "true",
        ]
        command += ["--output_dir", folder]
        ticks: list[tuple[float, float]] = []
        peak_bytes = 0
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            for line in process.stdout or ():
                tokens = _TOKENS.search(line)
                if tokens and "train_runtime" not in line:
                    ticks.append((time.monotonic(), float(tokens.group(1))))
                elif line.startswith(_PEAK):
                    peak_bytes = int(line.removeprefix(_PEAK))
        if process.returncode:
            raise SystemExit(f"{script} ended with exit status {process.returncode}")
    (first, before), (last, after) = ticks[min(_SETTLING_STEPS, len(ticks) // 2)], ticks[-1]
    return Kept((after - before) / (last - first), peak_bytes)


if __name__ == "__main__":
    sys.exit(main())
