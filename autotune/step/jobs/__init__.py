"""The types of job that a child process can run."""

from __future__ import annotations

from autotune.core.protocol import (
    CheckPackingRequest,
    Job,
    OperatorsRequest,
    PrepareRequest,
    ProbeRequest,
    ReadCommandRequest,
    SpeedsRequest,
)
from autotune.core.traced import TraceRequest
from autotune.step.job import JobType
from autotune.step.jobs.build import build
from autotune.step.jobs.check_packing import check_packing
from autotune.step.jobs.operators import measure_operators
from autotune.step.jobs.prepare import prepare
from autotune.step.jobs.probe import probe
from autotune.step.jobs.read_command import read_command
from autotune.step.jobs.speeds import measure_speeds
from autotune.step.jobs.trace import trace

JOBS: dict[str, JobType] = {
    Job.PREPARE: JobType(PrepareRequest, prepare),
    Job.CHECK_PACKING: JobType(CheckPackingRequest, check_packing),
    Job.PROBE: JobType(ProbeRequest, probe),
    Job.TRACE: JobType(TraceRequest, trace),
    Job.BUILD: JobType(TraceRequest, build),
    Job.READ_COMMAND: JobType(ReadCommandRequest, read_command),
    Job.MEASURE_SPEEDS: JobType(SpeedsRequest, measure_speeds),
    Job.MEASURE_OPERATORS: JobType(OperatorsRequest, measure_operators),
}
