"""The parent's side of job processes: starts them, sends jobs, waits, kills, and classifies failures. No torch."""

from autotune.probing.jobs import check_packing, measure_operators, measure_speeds, prepare, probe, trace
from autotune.probing.server import JobServer

__all__ = [
    "JobServer",
    "check_packing",
    "measure_operators",
    "measure_speeds",
    "prepare",
    "probe",
    "trace",
]
