"""The parent's side of isolated processes: start, ask, wait, end, and tell what happened. Imports no torch."""

from autotune.probing.jobs import check_packing, prepare, probe, trace
from autotune.probing.server import JobServer

__all__ = ["JobServer", "check_packing", "prepare", "probe", "trace"]
