"""Inspects the installed software: relevant versions, autotune's requirements, and torch's CUDA support."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
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


def installed_packages() -> dict[str, str]:
    """Return the versions of the relevant distributions, by name; those that are not installed are absent."""
    found = {}
    for name in (*REQUIRED, *OPTIONAL):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
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
    for node in ast.parse(source).body:
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        if any(isinstance(target, ast.Name) and target.id == "cuda" for target in targets):
            value = getattr(node, "value", None)
            return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None
    return None
