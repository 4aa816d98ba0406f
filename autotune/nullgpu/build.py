"""Compiles the null GPU's library into the cache, once for each PyTorch, compiler and version of the sources."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from autotune.core.files.atomic import cache_directory, remove_partial_files
from autotune.emit.files import check_writable
from autotune.errors import AutotuneError
from autotune.nullgpu.installation import Installation, installation
from autotune.nullgpu.symbols import called_functions, exported_functions, stubs, version_script

_SOURCES = Path(__file__).parent
_LIBRARY = "libnullgpu.so"
# File with the sonames of NVIDIA's libraries, one per line; each is a link to the null GPU's library.
SONAMES = "sonames"


def build_library() -> Path:
    """Return the folder with the library and its links; the first call builds them, which takes seconds.

    Raises:
        InputError: this machine lacks a requirement, or the cache cannot be written.
        AutotuneError: the compiler failed.
    """
    installed = installation()
    folder = cache_directory() / "nullgpu" / _key(installed)
    if (folder / SONAMES).is_file():
        return folder
    check_writable(folder, "XDG_CACHE_HOME")
    folder.parent.mkdir(parents=True, exist_ok=True)
    remove_partial_files(folder)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.", suffix=".part") as name:
        staging = Path(name) / "built"
        staging.mkdir()
        _compile(installed, staging)
        try:
            staging.rename(folder)
        except OSError:
            # Another process has built the same library meanwhile.
            if not (folder / SONAMES).is_file():
                raise
    return folder


def _key(installed: Installation) -> str:
    """Return a hash of the library's sources, macros, modules, headers and compiler."""
    sources = [*sorted((_SOURCES / "shim").iterdir()), _SOURCES / "symbols.py", Path(__file__)]
    compiler = subprocess.run([installed.compiler, "--version"], capture_output=True, text=True, check=True).stdout
    parts = [installed.packages, *_macros(installed), *map(str, installed.modules), str(installed.includes), compiler]
    digest = hashlib.sha256("\0".join(parts).encode())
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def _macros(installed: Installation) -> list[str]:
    numbers = {
        "CUDA_VERSION": installed.cuda,
        # PyTorch names no version of cuBLAS; it follows CUDA's.
        "CUBLAS_VERSION": installed.cuda * 10,
        "CUDNN_VERSION": installed.cudnn,
        "NCCL_VERSION": installed.nccl,
        "ARCHITECTURES": ",".join(map(str, installed.architectures)),
    }
    return [f"-DNULLGPU_{name}={value}" for name, value in numbers.items()]


def _compile(installed: Installation, folder: Path) -> None:
    """Compile the sources and the stubs, link them, and add a symbolic link for each soname."""
    compiler, flags = installed.compiler, ["-O1", "-g1", "-fPIC", "-fvisibility=hidden"]
    sources = sorted((_SOURCES / "shim").glob("*.cpp"))
    objects = [folder / f"{source.stem}.o" for source in sources]
    compiling = [
        [compiler, "-std=c++17", *flags, "-isystem", str(installed.includes), *_macros(installed), "-c", str(source)]
        for source in sources
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(_run, [[*command, "-o", str(to)] for command, to in zip(compiling, objects, strict=True)]))
    libraries = called_functions(installed)
    implemented = exported_functions(objects)
    (folder / "stubs.c").write_text(stubs(libraries, implemented), encoding="utf-8")
    (folder / "versions.map").write_text(version_script(libraries, implemented), encoding="utf-8")
    # gcc takes some stub names for built-in functions.
    compile_stubs = [compiler, "-x", "c", "-O1", "-fPIC", "-fno-builtin", "-c", str(folder / "stubs.c")]
    _run([*compile_stubs, "-o", str(folder / "stubs.o")])
    _run(
        [
            *[compiler, "-shared", f"-Wl,--version-script={folder / 'versions.map'}", f"-Wl,-soname,{_LIBRARY}"],
            *["-o", str(folder / _LIBRARY), *map(str, objects), str(folder / "stubs.o"), "-ldl", "-lpthread"],
        ]
    )
    for each in objects:
        each.unlink()
    sonames = [each.soname for each in libraries.values()]
    for soname in sonames:
        (folder / soname).symlink_to(_LIBRARY)
    # Triton links its launcher with -lcuda.
    (folder / "libcuda.so").symlink_to(_LIBRARY)
    (folder / SONAMES).write_text("".join(f"{soname}\n" for soname in sonames), encoding="utf-8")


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise AutotuneError(f"The null GPU could not be built: {shutil.which(command[0])}: {last[0]}", hint=done.stderr)
