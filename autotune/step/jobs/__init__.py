"""The types of job that a child process can run."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.step.job import JobFunction
from autotune.step.jobs.build import build
from autotune.step.jobs.check_packing import check_packing
from autotune.step.jobs.operators import measure_operators
from autotune.step.jobs.prepare import prepare
from autotune.step.jobs.probe import probe
from autotune.step.jobs.read_command import read_command
from autotune.step.jobs.smoke_test import smoke_test
from autotune.step.jobs.speeds import measure_speeds
from autotune.step.jobs.trace import trace

JOBS: Mapping[str, JobFunction] = {
    run.__name__: run
    for run in (
        build,
        check_packing,
        measure_operators,
        measure_speeds,
        prepare,
        probe,
        read_command,
        smoke_test,
        trace,
    )
}
