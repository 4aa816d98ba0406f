"""The types of job that a child process can run: a function of this name in a module of this name for each."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from autotune.core.jobs.protocol import Job
from autotune.step.job import JobFunction

JOBS: Mapping[str, JobFunction] = {job: getattr(import_module(f"{__name__}.{job}"), job) for job in Job}
