"""Writes the table of operators that are a kernel on CUDA and a composite elsewhere, from a CUDA build of PyTorch.

Run ``python -m tests.virtual.write_cuda_kernels``.
The entry of the installed PyTorch's release is replaced; the others stay. No GPU is needed: the dispatcher is asked.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import yaml
from packaging.version import Version

from autotune.virtual import cuda_kernels


def in_dispatcher() -> tuple[str, ...]:
    """Return the names, such as ``aten::silu_backward``, of PyTorch's operators with a CUDA kernel and a composite.

    A PyTorch that was built without CUDA has no CUDA kernels, and the result is empty.
    """
    has_kernel = cuda_kernels.has_kernel
    return tuple(
        name
        for name in sorted(torch._C._dispatch_get_all_op_names())
        if torch._C._dispatch_has_kernel(name) and has_kernel(name, "CUDA") and has_kernel(name, cuda_kernels.COMPOSITE)
    )


def main() -> None:
    """Write the table.

    Raises:
        SystemExit: this PyTorch was built without CUDA.
    """
    if not torch.backends.cuda.is_built():
        sys.exit(f"torch {torch.__version__} was built without CUDA: it has no CUDA kernels to list.")
    path = Path(cuda_kernels.__file__).with_name(cuda_kernels.TABLE)
    text = path.read_text(encoding="utf-8")
    header = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    table = dict(yaml.safe_load(text) or {}) | {cuda_kernels.release(): list(in_dispatcher())}
    ordered = {key: table[key] for key in sorted(table, key=Version)}
    path.write_text(header + yaml.safe_dump(ordered, sort_keys=False), encoding="utf-8")


if __name__ == "__main__":
    main()
