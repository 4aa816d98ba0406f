"""Runs a bundle's ``train.py`` unchanged in a separate process, and reads its peak, its steps and their times."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.core.documents.result import Result

_PEAK, _PASS = "PEAK ", "PASS "
# Runs in the training process: the baseline is taken after the imports, as in a probe. The kernel's high-water mark
# counts pages of files as well, which come and go: it is read so often that they hardly change meanwhile.
_RUNNER = """
import os, runpy, sys, threading, time
from autotune.step.imports import prepare_environment, preload
device, script = sys.argv[1:3]
prepare_environment(device, processes=int(os.environ.get("WORLD_SIZE", "1")))
preload(device)
import trl
def timed(precompute):
    def timing(trainer, dataset, name, *rest):
        began = time.monotonic()
        computed = precompute(trainer, dataset, name, *rest)
        if name == "train":
            print("PASS", time.monotonic() - began, flush=True)
        return computed
    return timing
for trainer in (trl.DPOTrainer, trl.KTOTrainer):
    trainer._precompute_ref_logps = timed(trainer._precompute_ref_logps)
from autotune.step.run.meters import METERS
meter, ended = METERS[device](), threading.Event()
def laps():
    while not ended.wait(0.1):
        meter.lap()
reader = threading.Thread(target=laps, daemon=True)
if device == "cpu":
    reader.start()
sys.argv[:3] = [script]
runpy.run_path(script, run_name="__main__")
ended.set()
if device == "cpu":
    reader.join()
print("PEAK", meter.peaks().peak_bytes, flush=True)
"""


@dataclass(frozen=True)
class RealRun:
    """A training that ended.

    Attributes:
        code: its exit status.
        lines: seconds and text of each line that it printed.
        peak_bytes: above what the imports take, of the process that needs most; None if it failed.
        pass_seconds: of the reference's pass over the training rows before the first step; 0 without one.
        errors: lines of its standard error.
    """

    code: int
    lines: Sequence[tuple[float, str]]
    peak_bytes: int | None
    pass_seconds: float
    errors: Sequence[str]


def real_run(script: Path, result: Result, options: Mapping[str, str]) -> RealRun:
    """Run a bundle's script with the processes and threads of its probes, and return what they printed.

    Args:
        options: further arguments of the script; those of its output folder and log are given already.
    """
    with tempfile.TemporaryDirectory(prefix="autotune-") as folder:
        runner = Path(folder) / "runner.py"
        runner.write_text(_RUNNER, encoding="utf-8")
        ranks = result.hardware.processes
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        command = [sys.executable, *launcher, str(runner), result.hardware.kind, str(script.resolve())]
        all_options = {"--logging_steps": "1", "--disable_tqdm": "true", "--output_dir": folder, **options}
        command += [word for option in all_options.items() for word in option]
        # A line has to arrive when its step ends: the clock is read then.
        environment = {
            **os.environ,
            # PyTorch is imported before the script that would set them.
            **result.hardware.environment,
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": str(result.hardware.threads),
        }
        log = Path(folder) / "log.txt"
        with (
            log.open("w", encoding="utf-8") as errors,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as process,
        ):
            lines = [(time.monotonic(), line) for line in process.stdout or ()]
        written = log.read_text(encoding="utf-8", errors="replace").splitlines()
    peaks = [int(line.removeprefix(_PEAK)) for _, line in lines if line.startswith(_PEAK)]
    passes = [float(line.removeprefix(_PASS)) for _, line in lines if line.startswith(_PASS)]
    return RealRun(process.returncode, lines, max(peaks, default=None), max(passes, default=0.0), written)
