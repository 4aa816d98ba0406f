"""Inspects the installed software: versions, autotune's requirements, and the CUDA version of torch."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from autotune.errors import InputError

REQUIRED: Mapping[str, str] = {
    "torch": ">=2.11",
    "transformers": ">=5.16,<6",
    "trl": ">=1.16,<2",
    "accelerate": ">=1.10.1",
    "peft": ">=0.20",
    "datasets": ">=4.8.4",
    "optuna": ">=5,<6",
}
"""Required distributions and versions; the same as in ``pyproject.toml``, which a test checks."""

NEWEST_TESTED: Mapping[str, str] = {
    "torch": "2.15.0",
    "transformers": "5.24.0",
    "trl": "1.16.0",
    "accelerate": "1.15.0",
    "peft": "0.21.2",
    "datasets": "5.2.0",
    "optuna": "5.0.0",
}
"""The newest releases of :data:`REQUIRED` that autotune was tested with; a test compares README and constraints.txt."""

OPTIONAL = (
    "bitsandbytes",
    "liger-kernel",
    "kernels",
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "deepspeed",
    "triton",
    "torchao",
    "galore-torch",
    "apollo-torch",
    "lomo-optim",
    "vllm",
)
"""Distributions that some choices need. FlashAttention 2, 3 and 4 are three distributions."""
_SOURCE_DIGITS = 12
# A line of torch/version.py: `cuda: Optional[str] = '13.0'`, or None in place of the version.
_BUILT_FOR = re.compile(r"^(cuda|hip|xpu)\b.*= ['\"](.+)['\"]$", re.MULTILINE)


def installed_packages() -> dict[str, str]:
    """Return the versions of :data:`REQUIRED` and :data:`OPTIONAL` distributions that are installed, by name.

    A version from a repository or a folder ends in its commit, or in a hash of its code, such as ``1.16.0+3f2a…``.
    """
    versions = {}
    for name in (*REQUIRED, *OPTIONAL):
        with suppress(metadata.PackageNotFoundError):
            distribution = metadata.distribution(name)
            if not (version := distribution.version):  # After an interrupted installation there is none.
                continue
            source = _source_id(name, json.loads(distribution.read_text("direct_url.json") or "{}"))
            versions[name] = version
            if source:
                versions[name] += f"{'.' if '+' in version else '+'}{source[:_SOURCE_DIGITS]}"
    return versions


def _source_id(name: str, origin: Mapping[str, Mapping[str, str]]) -> str:
    """Return the commit of a distribution from a repository, or the hash of its code in a folder; empty for a release.

    Args:
        origin: its ``direct_url.json`` (https://packaging.python.org/en/latest/specifications/direct-url-data-structure).
    """
    if "vcs_info" in origin:
        return origin["vcs_info"]["commit_id"]
    spec = importlib.util.find_spec(name.replace("-", "_")) if "dir_info" in origin else None
    if spec is None:
        return ""
    digest = hashlib.sha256()
    for file in sorted(file for place in spec.submodule_search_locations or () for file in Path(place).rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def check_required(packages: Mapping[str, str]) -> None:
    """Check that this is Linux, and that the :data:`REQUIRED` packages are installed.

    Raises:
        InputError: it is another system, or a package is missing or has an unsupported version.
    """
    if sys.platform != "linux":
        raise InputError(
            f"autotune needs Linux, and this is {sys.platform}.", hint="Use WSL 2, a container or a server."
        )
    from packaging.specifiers import SpecifierSet

    for name, versions in REQUIRED.items():
        hint = f"Run: pip install '{name}{versions}'"
        if name not in packages:
            raise InputError(f"{name} is not installed.", hint=hint)
        if not SpecifierSet(versions).contains(packages[name], prereleases=True):
            raise InputError(f"{name} {packages[name]} is installed; autotune needs {name}{versions}.", hint=hint)


def newer_than_tested(packages: Mapping[str, str]) -> dict[str, str]:
    """Return the newest tested versions of the packages of which a later release is installed; bug fixes do not count.

    Args:
        packages: installed versions, by name.
    """
    from packaging.version import Version

    def release(version: str) -> tuple[int, ...]:
        return Version(version).release[:2]

    known = {name: tested for name, tested in NEWEST_TESTED.items() if name in packages}
    return {name: tested for name, tested in known.items() if release(packages[name]) > release(tested)}


def torch_cuda_version() -> str | None:
    """Return the CUDA version that the installed torch was built for, or None for a build without CUDA.

    Raises:
        InputError: as in :func:`torch_builds`.
    """
    return torch_builds().get("cuda")


def torch_builds() -> dict[str, str]:
    """Return what the installed torch was built for, with versions: ``cuda``, ``hip`` (ROCm) or ``xpu``; else empty.

    It is read from ``torch/version.py``, since importing torch takes seconds.

    Raises:
        InputError: torch lacks that file.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    file = Path(spec.origin).with_name("version.py")
    try:
        return dict(_BUILT_FOR.findall(file.read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        hint = "Install torch again: pip install --force-reinstall torch"
        raise InputError(f"The installation of torch is incomplete: {file} is missing.", hint=hint) from error
