"""The use cases, one per module; the only place that wires the parts together."""

from __future__ import annotations

from autotune.api.catalogue import catalogue
from autotune.api.estimate import estimate
from autotune.api.lengths import lengths
from autotune.api.plan import plan
from autotune.api.probe import probe
from autotune.api.result import ProbeResult

__all__ = ["ProbeResult", "catalogue", "estimate", "lengths", "plan", "probe"]
