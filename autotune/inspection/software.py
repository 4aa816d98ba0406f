"""Inspects the installed software: relevant versions, autotune's requirements, and torch's CUDA support."""

from __future__ import annotations

import importlib.util
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
# A line of torch/version.py: `cuda: Optional[str] = '13.0'`, or None in place of the version.
_CUDA = re.compile(r"^cuda\b.*= ['\"](.+)['\"]$", re.MULTILINE)


def installed_packages() -> dict[str, str]:
    """Return the versions of the relevant distributions, by name; those that are not installed are absent."""
    found = {}
    for name in (*REQUIRED, *OPTIONAL):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


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
