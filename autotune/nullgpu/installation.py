"""The parts of a null GPU: the installed PyTorch's libraries and versions, CUDA's headers and a compiler."""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from autotune.errors import InputError
from autotune.inspection.software import torch_cuda_version

# The shim implements this CUDA version's interface; other versions differ in structures and names.
_CUDA_MAJOR = 13
_HINT = "`pip install torch` on Linux takes PyTorch's CUDA build; NVIDIA's own libraries are not needed."


@dataclass(frozen=True)
class Installation:
    """The parts of a null GPU.

    Attributes:
        modules: shared libraries that call NVIDIA's: PyTorch's, and bitsandbytes' for the same CUDA.
        includes: folder with CUDA's headers.
        triton_driver: source that Triton compiles its launcher from, which names functions of the driver.
        compiler: path of ``g++``.
        packages: versions of torch, triton and bitsandbytes, as requirements.
        cuda: CUDA_VERSION of CUDA's headers: 13000 for 13.0.
        cudnn: CUDNN_VERSION of cuDNN's header: 91300 for 9.13.0.
        nccl: NCCL_VERSION_CODE of NCCL's header: 22705 for 2.27.5.
        architectures: compute capabilities that PyTorch's kernels were built for, such as 90.
    """

    modules: tuple[Path, ...]
    includes: Path
    triton_driver: Path
    compiler: str
    packages: str
    cuda: int
    cudnn: int
    nccl: int
    architectures: tuple[int, ...]


def installation() -> Installation:
    """Find the parts of a null GPU on this machine.

    Raises:
        InputError: requirements are missing; the message names all of them.
    """
    what, torch, headers = missing_requirements(), _folder("torch"), _headers()
    if what or torch is None or headers is None:
        raise InputError(f"A null GPU needs {what}.", hint=_HINT)
    version = torch_cuda_version() or ""
    modules = sorted((torch / "lib").glob("*.so"))
    if (bitsandbytes := _folder("bitsandbytes")) is not None:
        modules += bitsandbytes.glob(f"libbitsandbytes_cuda{version.replace('.', '')}.so")
    return Installation(
        modules=tuple(modules),
        includes=headers,
        triton_driver=headers.with_name("driver.c"),
        compiler=shutil.which("g++") or "",
        packages=" ".join(f"{name}=={_version(name)}" for name in ("torch", "triton", "bitsandbytes")),
        cuda=_number(version, (1000, 10)),
        cudnn=_number(_pinned("cudnn"), (10000, 100, 1)),
        nccl=_number(_pinned("nccl"), (10000, 100, 1)),
        architectures=_architectures(torch / "lib" / "libtorch_python.so"),
    )


def missing_requirements() -> str:
    """Return the requirements of null GPUs that this machine lacks, separated by commas; empty if none."""
    return ", ".join(_missing())


def _missing() -> Iterator[str]:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        yield f"Linux on x86-64 (this is {platform.system()} on {platform.machine()})"
    cuda = torch_cuda_version()
    if cuda is None:
        yield f"a CUDA build of PyTorch (torch {_version('torch')} is installed)"
    elif not cuda.startswith(f"{_CUDA_MAJOR}."):
        yield f"a build of PyTorch for CUDA {_CUDA_MAJOR} (torch {_version('torch')} is for CUDA {cuda})"
    for program in ("g++", "nm", "readelf"):
        if shutil.which(program) is None:
            yield f"{program} ({'a C++ compiler' if program == 'g++' else 'of binutils'})"
    headers = _headers()
    if headers is None:
        yield "CUDA's headers, which Triton brings (pip install triton)"
    elif (major := _major_of(headers)) != _CUDA_MAJOR:
        yield f"CUDA {_CUDA_MAJOR}'s headers (triton {_version('triton')} brings those of CUDA {major})"


def _headers() -> Path | None:
    """Return the folder of CUDA's headers that Triton brings, or None where there is none."""
    triton = _folder("triton")
    found = triton / "backends" / "nvidia" / "include" if triton is not None else None
    return found if found is not None and (found / "cuda.h").is_file() else None


def _major_of(headers: Path) -> int:
    found = re.search(r"#define CUDA_VERSION (\d+)", (headers / "cuda.h").read_text(encoding="utf-8"))
    return int(found[1]) // 1000 if found else 0


def _folder(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _pinned(library: str) -> str:
    """Return the version of one of NVIDIA's libraries from PyTorch's requirements, such as ``nvidia-cudnn-cu13==…``.

    Raises:
        InputError: PyTorch does not require it.
    """
    for requirement in metadata.requires("torch") or ():
        found = re.match(rf"nvidia-{library}-cu\d+==([\d.]+)", requirement)
        if found:
            return found[1]
    raise InputError(f"The requirements of torch {_version('torch')} name no nvidia-{library}.", hint=_HINT)


def _number(version: str, weights: tuple[int, ...]) -> int:
    """Encode a version as a library's header does: 13.0 with the weights (1000, 10) is 13000."""
    parts = [int(part) for part in re.findall(r"\d+", version)]
    return sum(part * weight for part, weight in zip(parts, weights, strict=False))


def _architectures(library: Path) -> tuple[int, ...]:
    """Return the compute capabilities of ``torch.cuda.get_arch_list()``, read without importing PyTorch."""
    found = re.search(rb"\0((?:sm_\d+[af]? ?)+(?:compute_\d+ ?)*)\0", library.read_bytes())
    if found is None:
        raise InputError(f"{library} names no architectures of GPUs.", hint=_HINT)
    return tuple(sorted({int(number) for number in re.findall(rb"sm_(\d+)", found[1])}))
