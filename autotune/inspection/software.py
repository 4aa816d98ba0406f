"""Inspects the installed software: relevant versions, autotune's requirements, and torch's CUDA support."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
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
"""Distributions that enable further choices. FlashAttention 2, 3 and 4 are three distributions."""
_DIGITS = 12
# A line of torch/version.py: `cuda: Optional[str] = '13.0'`, or None in place of the version.
_CUDA = re.compile(r"^cuda\b.*= ['\"](.+)['\"]$", re.MULTILINE)


def installed_packages() -> dict[str, str]:
    """Return the versions of the relevant distributions, by name; those that are not installed are absent.

    An installation from a repository or a folder has its commit, or a hash of its code, as the local part.
    """
    found = {}
    for name in (*REQUIRED, *OPTIONAL):
        with suppress(metadata.PackageNotFoundError):
            distribution = metadata.distribution(name)
            source = _source(name, json.loads(distribution.read_text("direct_url.json") or "{}"))
            found[name] = distribution.version
            if source:
                found[name] += f"{'.' if '+' in distribution.version else '+'}{source[:_DIGITS]}"
    return found


def _source(name: str, origin: Mapping[str, Mapping[str, str]]) -> str:
    """Return what identifies the code of a distribution beside its version; empty for a release.

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
    """Check that what autotune requires is installed.

    Raises:
        InputError: a package is missing, or has a version that autotune does not know.
    """
    from packaging.specifiers import SpecifierSet

    for name, versions in REQUIRED.items():
        hint = f"Run: pip install '{name}{versions}'"
        if name not in packages:
            raise InputError(f"{name} is not installed.", hint=hint)
        if not SpecifierSet(versions).contains(packages[name], prereleases=True):
            raise InputError(f"{name} {packages[name]} is installed; autotune needs {name}{versions}.", hint=hint)


def torch_cuda_version() -> str | None:
    """Return the CUDA version that the installed torch was built for, or None for a build without CUDA.

    Its ``version.py`` is read, because importing torch takes seconds.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    source = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    found = _CUDA.search(source)
    return found[1] if found is not None else None
