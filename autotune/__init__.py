"""Find the fastest TRL configuration that fits, by probing real training steps on the target device.

``probe`` searches, ``plan`` and ``estimate`` predict without a GPU, ``rent`` compares many GPUs, ``check`` tests before
a job whether its configuration runs and fits, ``dry_run`` runs any training script on null GPUs, ``lengths`` shows the
lengths of a dataset, ``report`` writes a page about a search or a plan, ``catalogue`` lists the knobs. Importing this
package imports nothing heavy: torch and TRL are loaded in separate processes, or when a result is turned into ``trl``
objects.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autotune.api.check import check
    from autotune.api.preflight import PreflightCallback
    from autotune.api.probe import ProbeResult, probe
    from autotune.app.catalogue import catalogue
    from autotune.app.dry_run import dry_run
    from autotune.app.estimate import estimate
    from autotune.app.lengths import lengths
    from autotune.app.plan import plan
    from autotune.app.rent import rent
    from autotune.app.report import report
    from autotune.core.documents.catalogue import CatalogueRow
    from autotune.core.documents.dry_run import DryRun
    from autotune.core.documents.estimate import Estimate, MemoryEstimate, Plan
    from autotune.core.documents.length_report import LengthReport
    from autotune.core.documents.rent import Rent
    from autotune.core.documents.verdict import Verdict, WillNotFit
    from autotune.errors import AutotuneError, InputError

__all__ = [
    "AutotuneError",
    "CatalogueRow",
    "DryRun",
    "Estimate",
    "InputError",
    "LengthReport",
    "MemoryEstimate",
    "Plan",
    "PreflightCallback",
    "ProbeResult",
    "Rent",
    "Verdict",
    "WillNotFit",
    "catalogue",
    "check",
    "dry_run",
    "estimate",
    "lengths",
    "plan",
    "probe",
    "rent",
    "report",
]
__version__ = "0.1.0"

# By module; any other name is that of a module in ``autotune.app``, which has a function of this name.
_NAMES = {
    "autotune.api.check": ("check",),
    "autotune.api.preflight": ("PreflightCallback",),
    "autotune.api.probe": ("ProbeResult", "probe"),
    "autotune.core.documents.catalogue": ("CatalogueRow",),
    "autotune.core.documents.dry_run": ("DryRun",),
    "autotune.core.documents.estimate": ("Estimate", "MemoryEstimate", "Plan"),
    "autotune.core.documents.length_report": ("LengthReport",),
    "autotune.core.documents.rent": ("Rent",),
    "autotune.core.documents.verdict": ("Verdict", "WillNotFit"),
    "autotune.errors": ("AutotuneError", "InputError"),
}

# A type checker that sees this function accepts every misspelt name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module 'autotune' has no attribute {name!r}")
        home = next((module for module, names in _NAMES.items() if name in names), f"autotune.app.{name}")
        return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
