"""Finds the NVIDIA functions that PyTorch calls; generates stubs for those the shim lacks, and the linker's script."""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from autotune.nullgpu.installation import Installation

# Library without ``.so``: regular expression of the prefixes of its functions; the first match wins.
_FUNCTION_PREFIXES = {
    "libcudart": r"cuda[A-Z]|__cuda",
    "libcublasLt": r"cublasLt",
    "libcublas": r"cublas",
    "libcudnn": r"cudnn",
    "libcusparseLt": r"cusparseLt",
    "libcusparse": r"cusparse",
    "libcusolver": r"cusolver",
    "libcufft": r"cufft",
    "libcurand": r"curand",
    "libcufile": r"cuFile",
    "libcupti": r"cupti",
    "libnvrtc": r"nvrtc",
    "libnvshmem_host": r"nvshmem",
    "libnccl": r"nccl",
    "libnvidia-ml": r"nvml",
    "libcuda": r"cu[A-Z]",
}
# Libraries that PyTorch loads with dlopen, by these sonames.
_DLOPENED = {"libcuda": "libcuda.so.1", "libnvidia-ml": "libnvidia-ml.so.1"}
# Version node of the shim's own functions in the linker's script.
_SHIM_NODE = "NULLGPU"
# Functions of the C library that the shim replaces (``shim/host.cpp``), by their symbol version on x86-64.
_LIBC_FUNCTIONS = {"GLIBC_2.2.5": {"mmap", "mmap64"}}


@dataclass(frozen=True)
class Refusal:
    """Functions that fail on a null GPU.

    Attributes:
        pattern: regular expression of their whole names.
        code: the returned code, which is the library's own for "not supported".
        belongs_to: their feature, which the error names.
    """

    pattern: str
    code: int
    belongs_to: str


REFUSALS = (
    Refusal(r"cudaGraph\w+|cudaStream(BeginCapture|EndCapture|UpdateCapture)\w*", 801, "CUDA graphs"),
    Refusal(r"cuGraph\w+|cuStreamBeginCapture\w*", 801, "CUDA graphs"),
    Refusal(
        r"cudaIpc\w+|cuMem(Export|Import)\w+|cuMemRetainAllocationHandle|cuMemGetAllocationPropertiesFromHandle",
        801,
        "device memory shared between processes",
    ),
    Refusal(r"cuMulticast\w+|cuStreamWriteValue32\w*|cuMemsetD32Async", 801, "symmetric memory"),
    Refusal(r"cuGreenCtx\w+|cuCtxFromGreenCtx|cuDevSm\w+|cu\w*DevResource\w*", 801, "green contexts"),
    # The functions below write sizes or results that the caller reads on the host.
    Refusal(r"cudnnGet\w*(Workspace|Space|States)Sizes?\w*|cudnn(Find|Get)\w*Algorithm\w*", 3000, "cuDNN's older API"),
    Refusal(r"cudnnDropoutGetStatesSize|cudnn\w*RNN\w*", 3000, "cuDNN's recurrent layers"),
    Refusal(r"cudnn\w*CTC\w*", 3000, "cuDNN's CTC loss"),
    Refusal(r"cusolverDn(?!Create$|Destroy$|SetStream$)\w+", 9, "dense linear algebra of cuSOLVER"),
    Refusal(
        r"cusparse(?!Lt)(?!Create$|Destroy$|SetStream$|SetPointerMode$|GetErrorString$)\w+", 10, "sparse matrices"
    ),
    Refusal(r"cusparseLt\w+", 10, "structured sparsity of cuSPARSELt"),
    Refusal(r"cufft(?!GetErrorString$)\w+", 16, "Fourier transforms of cuFFT"),
    Refusal(r"curand(?!GetErrorString)\w+", 101, "cuRAND's generators on the host"),
    Refusal(r"cuFile\w+", 5001, "GPUDirect Storage"),
    Refusal(r"nvshmem\w+", 1, "NVSHMEM"),
    Refusal(r"ncclCommInitAll", 5, "several GPUs of one process, as DataParallel has them"),
    Refusal(
        r"nccl(CommShrink|CommGrow|CommWindow\w+|CommRegister|CommDeregister|MemAlloc|MemFree|DevComm\w+"
        r"|Put\w+|Signal|WaitSignal|Get\w+Pointer|CommSuspend|CommResume|GroupSimulateEnd|CommMemStats)",
        5,
        "registered buffers and one-sided operations of NCCL",
    ),
)  # fmt: skip
"""Functions of NVIDIA's libraries that a null GPU refuses, since a stub's success would mislead."""


@dataclass
class CalledFunctions:
    """The called functions of one of NVIDIA's libraries.

    Attributes:
        soname: such as ``libcudart.so.13``.
        versions: functions by the symbol version that modules link against.
    """

    soname: str
    versions: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    @property
    def default_version(self) -> str:
        """The version of functions looked up by name alone; version nodes cannot have hyphens."""
        return next(iter(self.versions), self.soname.replace("-", "_"))

    def functions(self) -> set[str]:
        """Return all functions."""
        return set().union(*self.versions.values())


def library_of(function: str) -> str | None:
    """Return a function's library, without ``.so``; None if it is not NVIDIA's."""
    return next((name for name, prefix in _FUNCTION_PREFIXES.items() if re.match(rf"(?:{prefix})", function)), None)


def called_functions(installed: Installation) -> dict[str, CalledFunctions]:
    """Return the called functions of each of NVIDIA's libraries, by its name without ``.so``."""
    libraries = {name: CalledFunctions(soname) for name, soname in _DLOPENED.items()}
    for module in installed.modules:
        for soname in re.findall(r"\(NEEDED\).*\[(.+)\]", _run("readelf", "--dynamic", "--wide", str(module))):
            name = soname.partition(".so")[0]
            if name in _FUNCTION_PREFIXES and name not in libraries:
                libraries[name] = CalledFunctions(soname)
    for module in installed.modules:
        _add(libraries, _undefined(module))
        # libc10_cuda.so looks up functions of the driver and of NVML by name.
        if module.name == "libc10_cuda.so":
            names = re.findall(rb"\0((?:cu[A-Z]|nvml)\w+)(?=\0)", module.read_bytes())
            _add(libraries, ((name.decode(), "") for name in names))
    # Triton compiles its launcher from this source at run time.
    calls = re.findall(r"\b(cu[A-Z][a-z]\w+)\(", installed.triton_driver.read_text(encoding="utf-8"))
    _add(libraries, ((name, "") for name in calls))
    return libraries


def exported_functions(objects: Iterable[Path]) -> set[str]:
    """Return the functions that compiled files of the shim export."""
    text = _run("nm", "--defined-only", *map(str, objects))
    return {line.split()[-1] for line in text.splitlines() if " T " in line and not line.split()[-1].startswith("_Z")}


def stubs(libraries: Mapping[str, CalledFunctions], implemented: set[str]) -> str:
    """Return the C source of the called functions that the shim lacks: each returns success or a refusal."""
    lines = ["/* Written by autotune/nullgpu/symbols.py. */", "long nullgpu_refuse(const char *, const char *, long);"]
    for function in sorted(set().union(*(each.functions() for each in libraries.values())) - implemented):
        refused = refusal(function)
        value = f'nullgpu_refuse("{function}", "{refused.belongs_to}", {refused.code})' if refused else "0"
        lines.append(f"long {function}(void) {{ return {value}; }}")
    return "\n".join(lines) + "\n"


def refusal(function: str) -> Refusal | None:
    """Return the refusal of a function, or None if its stub may return success."""
    return next((each for each in REFUSALS if re.fullmatch(each.pattern, function)), None)


def version_script(libraries: Mapping[str, CalledFunctions], implemented: set[str]) -> str:
    """Return the linker's version script, which exports each function in the version that modules link against."""
    nodes: dict[str, set[str]] = {}
    for name, each in libraries.items():
        for version, functions in each.versions.items():
            nodes.setdefault(version, set()).update(functions)
        # Implemented functions that no module links against may be looked up by name.
        exported = {function for function in implemented if library_of(function) == name}
        nodes.setdefault(each.default_version, set()).update(exported - each.functions())
    nodes |= {version: functions & implemented for version, functions in _LIBC_FUNCTIONS.items()}
    nodes[_SHIM_NODE] = {function for function in implemented if function.startswith("nullgpu_")}
    script = [
        f"{version} {{ global: {' '.join(f'{function};' for function in sorted(functions))} }};"
        for version, functions in nodes.items()
        if functions
    ]
    return "\n".join(script).replace("};", " local: *; };", 1) + "\n"


def _add(libraries: Mapping[str, CalledFunctions], functions: Iterable[tuple[str, str]]) -> None:
    """Add functions, given with their symbol versions; an empty version means any."""
    for function, version in functions:
        name = library_of(function)
        if name is None or name not in libraries:
            continue
        called = libraries[name]
        if version or not any(function in each for each in called.versions.values()):
            called.versions[version or called.default_version].add(function)


def _undefined(module: Path) -> Iterator[tuple[str, str]]:
    """Yield the undefined functions of a module, each with its symbol version, or ''."""
    for line in _run("nm", "--dynamic", "--undefined-only", str(module)).splitlines():
        function, _, version = line.split()[-1].partition("@")
        yield function, version.lstrip("@")


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
