"""Checks whether a package is installed, and in a version that a technique supports."""

from __future__ import annotations

from functools import cache
from importlib import metadata

from autotune.core.machine import Machine


def missing(package: str, machine: Machine) -> str | None:
    """Return that a package is not installed, or None if it is."""
    return None if package in machine.packages else f"the package {package} is not installed"


def installed(machine: Machine, package: str, versions: str) -> bool:
    """Return whether a package is installed in a version range, such as ``>=1.15,<2`` (PEP 440).

    A pre-release comes before its release: ``5.23.0.dev0`` is not in ``>=5.23``, nor is ``0.19.0.dev0`` in ``<0.19``.
    A text that is not a version is in no range.
    """
    return package in machine.packages and _lies_in(machine.packages[package], versions)


@cache
def required_by(distribution: str, package: str) -> str:
    """Return the versions of a package that an installed distribution takes by its metadata, such as ``>=1.15,<2``.

    An extra of the package's name has them. Empty where none does: any version.
    """
    from packaging.requirements import Requirement

    requirements = (Requirement(line) for line in metadata.requires(distribution) or ())
    return next((str(each.specifier) for each in requirements if each.name == package), "")


@cache  # called for every combination of a space
def _lies_in(version: str, versions: str) -> bool:
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        return SpecifierSet(versions).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False
