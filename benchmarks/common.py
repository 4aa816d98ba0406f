"""Helpers of several benchmarks: cases, cached rows, the command, a null GPU, and the time of a traced step."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from autotune.core.jobs.traced import TraceReply
from autotune.core.plan import TrainingPlan
from autotune.core.step_time import StepTime
from autotune.nullgpu.devices import null_device
from autotune.nullgpu.environment import environment
from autotune.planning.extrapolation.fit import Fit
from autotune.planning.extrapolation.forecast import mixed_times


class Named(Protocol):
    """A case."""

    @property
    def name(self) -> str:
        """Its name."""


N = TypeVar("N", bound=Named)


def chosen(cases: Iterable[N], words: Sequence[str] | None) -> list[N]:
    """Return the cases whose name has one of some words; all without any."""
    return [case for case in cases if not words or any(word in case.name for word in words)]


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a file, a JSON document a line; none if there is none."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def start_on_null_gpu(module: str, gpu: str, further: Mapping[str, str] | None = None) -> None:
    """Replace this process by one of a module, with its arguments, on null GPUs; do nothing in that.

    PyTorch's CUDA build does not start without NVIDIA's libraries, or what stands in for them.

    Args:
        further: variables in addition to those of null GPUs.
    """
    if "NULLGPU_DEVICE" not in os.environ:
        words = [sys.executable, "-m", module, *sys.argv[1:]]
        os.execve(sys.executable, words, {**environment(null_device(gpu)), **(further or {})})


@dataclass(frozen=True)
class Ran:
    """What a command has answered, and what it took.

    Attributes:
        processor_seconds: of all its processes.
        largest_bytes: memory of the largest process that this one has run so far.
    """

    document: Any
    wall_seconds: float
    processor_seconds: float
    largest_bytes: int


def with_cache(cache: Path) -> dict[str, str]:
    """Return the environment of a command with its own cache and without the Hub."""
    return {**os.environ, "XDG_CACHE_HOME": str(cache), "HF_HUB_OFFLINE": "1"}


def run_autotune(words: Sequence[str], cache: Path) -> Ran:
    """Run ``autotune`` with ``--json``.

    Raises:
        SystemExit: it has no answer.
    """
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    command = [sys.executable, "-m", "autotune", *words, "--json"]
    done = subprocess.run(command, env=with_cache(cache), stdout=subprocess.PIPE, check=False)
    wall_seconds, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    if not done.stdout:
        raise SystemExit(f"{' '.join(words)} ended with exit status {done.returncode}.")
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Ran(json.loads(done.stdout), wall_seconds, processor, after.ru_maxrss << 10)


def whole_step(plan: TrainingPlan, whole: TraceReply) -> StepTime | None:
    """Return the time of an optimizer step by a trace of all layers; None where speeds are not known."""
    forecast = Fit({1: whole}, 1).forecast(plan.micro_batches)
    terms = [(time, float(forecast.repeats(part, plan.micro_batches))) for part, time in forecast.times.items()]
    return mixed_times(terms) if terms else None
