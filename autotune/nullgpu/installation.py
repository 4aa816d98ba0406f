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

# The shim is written for the interface of this CUDA version; others differ in structures and names.
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
        packages: versions of what the above comes from, as text.
        cuda: CUDA's version as in its headers: 13000 for 13.0; ``cudnn`` and ``nccl`` likewise in their own ways.
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
    """Return what is installed.

    Raises:
        InputError: a null GPU cannot be built here; one sentence names all that lacks.
    """
    what = lacking()
    if what:
        raise InputError(f"A null GPU needs {what}.", hint=_HINT)
    torch, triton = _folder("torch"), _folder("triton") / "backends" / "nvidia"
    version = torch_cuda_version() or ""
    bitsandbytes = importlib.util.find_spec("bitsandbytes")
    modules = sorted((torch / "lib").glob("*.so"))
    if bitsandbytes is not None and bitsandbytes.origin is not None:
        modules += Path(bitsandbytes.origin).parent.glob(f"libbitsandbytes_cuda{version.replace('.', '')}.so")
    return Installation(
        modules=tuple(modules),
        includes=triton / "include",
        triton_driver=triton / "driver.c",
        compiler=shutil.which("g++") or "",
        packages=" ".join(f"{name}=={_version(name)}" for name in ("torch", "triton", "bitsandbytes")),
        cuda=_number(version, (1000, 10)),
        cudnn=_number(_pinned("cudnn"), (10000, 100, 1)),
        nccl=_number(_pinned("nccl"), (10000, 100, 1)),
        architectures=_architectures(torch / "lib" / "libtorch_python.so"),
    )


def lacking() -> str:
    """Return the requirements of null GPUs that this machine lacks, in words; empty if none."""
    return ", ".join(_lacking())


def _lacking() -> Iterator[str]:
    """Yield the requirements of null GPUs that this machine lacks."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        yield f"Linux on x86-64 (this is {platform.system()} on {platform.machine()})"
    cuda = torch_cuda_version()
    if importlib.util.find_spec("torch") is None or cuda is None:
        yield f"a CUDA build of PyTorch (torch {_version('torch')} is installed)"
    elif not cuda.startswith(f"{_CUDA_MAJOR}."):
        yield f"a build of PyTorch for CUDA {_CUDA_MAJOR} (torch {_version('torch')} is for CUDA {cuda})"
    for program in ("g++", "nm", "readelf"):
        if shutil.which(program) is None:
            yield f"{program} ({'a C++ compiler' if program == 'g++' else 'of binutils'})"
    spec = importlib.util.find_spec("triton")
    if spec is None or not (_folder("triton") / "backends" / "nvidia" / "include" / "cuda.h").is_file():
        yield "CUDA's headers, which Triton brings (pip install triton)"
    elif _header_major() != _CUDA_MAJOR:
        yield f"CUDA {_CUDA_MAJOR}'s headers (triton {_version('triton')} brings those of CUDA {_header_major()})"


def _header_major() -> int:
    text = (_folder("triton") / "backends" / "nvidia" / "include" / "cuda.h").read_text(encoding="utf-8")
    found = re.search(r"#define CUDA_VERSION (\d+)", text)
    return int(found[1]) // 1000 if found else 0


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise AssertionError(f"{package} was there a moment ago")
    return Path(spec.origin).parent


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _pinned(library: str) -> str:
    """Return the version of one of NVIDIA's libraries that PyTorch was built with, as its requirements name it.

    Raises:
        InputError: they do not name it.
    """
    for requirement in metadata.requires("torch") or ():
        found = re.match(rf"nvidia-{library}-cu\d+==([\d.]+)", requirement)
        if found:
            return found[1]
    raise InputError(f"The requirements of torch {_version('torch')} name no nvidia-{library}.", hint=_HINT)


def _number(version: str, weights: tuple[int, ...]) -> int:
    """Return a version as one number, as a library writes it: 13.0 with the weights (1000, 10) is 13000."""
    parts = [int(part) for part in re.findall(r"\d+", version)]
    return sum(part * weight for part, weight in zip(parts, weights, strict=False))


def _architectures(library: Path) -> tuple[int, ...]:
    """Return the compute capabilities of ``torch.cuda.get_arch_list()``, read without importing PyTorch."""
    found = re.search(rb"\0((?:sm_\d+[af]? ?)+(?:compute_\d+ ?)*)\0", library.read_bytes())
    if found is None:
        raise InputError(f"{library} names no architectures of GPUs.", hint=_HINT)
    return tuple(sorted({int(number) for number in re.findall(rb"sm_(\d+)", found[1])}))
