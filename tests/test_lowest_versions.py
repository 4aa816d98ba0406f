"""The versions that `make test-lowest` installs are the lowest that pyproject.toml allows."""

from __future__ import annotations

import tomllib
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


LOWEST, DEVELOPED = "constraints-lowest.txt", "constraints.txt"
NAMED_BY_TORCH = ("cuda-", "nvidia-", "triton")
"""Beginnings of the names of packages of which each build of torch requires versions of its own."""


def pins(file: str = LOWEST) -> dict[str, Version]:
    """Return the pinned versions by name; a line without a single version is an error."""
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    found: dict[str, Version] = {}
    for requirement in (Requirement(line) for line in lines if not line.startswith("#")):
        (pin,) = requirement.specifier
        assert pin.operator == "=="
        found[canonicalize_name(requirement.name)] = Version(pin.version)
    return found


def required() -> list[Requirement]:
    """Return what autotune and its extras require, but for the site, which is built with pinned versions alone."""
    extras = PROJECT["optional-dependencies"]
    lines = [*PROJECT["dependencies"], *(line for name in extras if name != "docs" for line in extras[name])]
    return [Requirement(line) for line in lines]


def lower_bounds(requirement: Requirement) -> list[Version]:
    """Return the lower bounds of a requirement: one, or none."""
    return [Version(part.version) for part in requirement.specifier if part.operator == ">="]


@pytest.mark.parametrize(
    "requirement", [one for one in required() if lower_bounds(one)], ids=lambda requirement: requirement.name
)
def test_the_lower_bound_of_a_requirement_is_the_version_that_is_tested(requirement: Requirement) -> None:
    assert lower_bounds(requirement) == [pins()[canonicalize_name(requirement.name)]]


def test_everything_that_autotune_imports_has_a_lower_bound() -> None:
    dependencies = map(Requirement, PROJECT["dependencies"])
    assert [requirement.name for requirement in dependencies if not lower_bounds(requirement)] == []


def test_every_build_of_a_pinned_version_will_do() -> None:
    assert [name for name, version in pins().items() if version.local] == []


def installed() -> dict[str, Version]:
    """Return what is installed of what autotune, its extras, and in turn those require, by name."""
    found: dict[str, Version] = {}
    seen: set[tuple[str, str]] = set()
    left = [(requirement.name, extra) for requirement in required() for extra in ("", *requirement.extras)]
    while left:
        name, extra = left.pop()
        name = canonicalize_name(name)
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        with suppress(metadata.PackageNotFoundError):
            found[name] = Version(metadata.version(name))
            needs = [Requirement(line) for line in metadata.requires(name) or ()]
            needs = [need for need in needs if need.marker is None or need.marker.evaluate({"extra": extra})]
            left += [(need.name, other) for need in needs for other in ("", *need.extras)]
    return {name: version for name, version in found.items() if not name.startswith(NAMED_BY_TORCH)}


@pytest.mark.parametrize("file", [DEVELOPED, LOWEST])
def test_whatever_pip_installs_beside_is_pinned(file: str) -> None:
    pinned, versions = pins(file), installed()
    if versions["torch"].public != pinned["torch"].public:
        pytest.skip(f"the versions of {file} are not those that are installed")
    assert sorted(versions.keys() - pinned) == []
