"""The types of job that a child process can run."""

from __future__ import annotations

from autotune.core import protocol
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
    protocol.Job.PREPARE: JobType(protocol.PrepareRequest, prepare),
    protocol.Job.CHECK_PACKING: JobType(protocol.CheckPackingRequest, check_packing),
    protocol.Job.PROBE: JobType(protocol.ProbeRequest, probe),
    protocol.Job.TRACE: JobType(TraceRequest, trace),
    protocol.Job.BUILD: JobType(TraceRequest, build),
    protocol.Job.READ_COMMAND: JobType(protocol.ReadCommandRequest, read_command),
    protocol.Job.MEASURE_SPEEDS: JobType(protocol.SpeedsRequest, measure_speeds),
    protocol.Job.MEASURE_OPERATORS: JobType(protocol.OperatorsRequest, measure_operators),
}
