"""Checks whether a package is installed in a version that a technique supports."""

from __future__ import annotations

from functools import cache

from autotune.core.machine import Machine

_ACCEPTED = {"bitsandbytes": ">=0.46.1", "deepspeed": ">=0.19.8"}
"""Version ranges by package.

bitsandbytes: what all supported releases of transformers accept (``utils/import_utils.py``). DeepSpeed: as in this
package's extra; some older versions compute wrong gradients under ZeRO-2 without an error
(https://github.com/deepspeedai/DeepSpeed/issues/8224).
"""
_FROM_METADATA = "kernels"
"""A package whose accepted versions depend on the release of transformers; its metadata has them."""


def missing(package: str, machine: Machine) -> str | None:
    """Return a reason if a package is missing or has an unsupported version; None otherwise."""
    versions = accepted_versions(package)
    if package not in machine.packages:
        return f"the package {package} is not installed" + (f" (pip install '{package}{versions}')" if versions else "")
    if not versions or installed(machine, package, versions):
        return None
    return f"{package}{versions} is needed, and {machine.packages[package]} is installed"


def installed(machine: Machine, package: str, versions: str) -> bool:
    """Return whether a package is installed in a version range, such as ``>=1.15,<2`` (PEP 440).

    A pre-release comes before its release: ``5.23.0.dev0`` is not in ``>=5.23``, nor is ``0.19.0.dev0`` in ``<0.19``.
    A text that is not a version is in no range.
    """
    return package in machine.packages and _is_in(machine.packages[package], versions)


@cache
def accepted_versions(package: str) -> str:
    """Return the accepted version range of a package, such as ``>=1.15,<2``; empty if all are accepted."""
    from importlib import metadata

    from packaging.requirements import Requirement

    if package != _FROM_METADATA:
        return _ACCEPTED.get(package, "")
    requirements = (Requirement(line) for line in metadata.requires("transformers") or ())
    return next((str(each.specifier) for each in requirements if each.name == package), "")


@cache  # called for every combination of a space
def _is_in(version: str, versions: str) -> bool:
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        return SpecifierSet(versions).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False
