"""Builds the null GPU's library into the cache, once for each PyTorch, compiler and version of the sources."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from autotune.core.files import cache_directory, remove_left
from autotune.emit.files import check_writable
from autotune.errors import AutotuneError
from autotune.nullgpu.installation import Installation, installation
from autotune.nullgpu.symbols import needed, stubs, version_script, written

_SOURCES = Path(__file__).parent
_LIBRARY = "libnullgpu.so"
# Names of NVIDIA's libraries, one in each line, beside the library that stands for all of them.
SONAMES = "sonames"


def built() -> Path:
    """Return the folder with the library and its links, which is built where it is not there yet; that takes seconds.

    Raises:
        InputError: this machine lacks something that is needed, or the cache cannot be written.
        AutotuneError: the compiler failed.
    """
    found = installation()
    folder = cache_directory() / "nullgpu" / _key(found)
    if (folder / SONAMES).is_file():
        return folder
    check_writable(folder, "XDG_CACHE_HOME")
    folder.parent.mkdir(parents=True, exist_ok=True)
    remove_left(folder)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.", suffix=".part") as name:
        beside = Path(name) / "built"
        beside.mkdir()
        _build(found, beside)
        try:
            beside.rename(folder)
        except OSError:
            # Another process was first.
            if not (folder / SONAMES).is_file():
                raise
    return folder


def _key(found: Installation) -> str:
    """Return a hash of all that the library is made from."""
    sources = [*sorted((_SOURCES / "shim").iterdir()), _SOURCES / "symbols.py", Path(__file__)]
    compiler = subprocess.run([found.compiler, "--version"], capture_output=True, text=True, check=True).stdout
    parts = [found.packages, *_macros(found), *map(str, found.modules), str(found.includes), compiler]
    digest = hashlib.sha256("\0".join(parts).encode())
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def _macros(found: Installation) -> list[str]:
    numbers = {
        "CUDA_VERSION": found.cuda,
        # PyTorch names no version of cuBLAS; it follows CUDA's.
        "CUBLAS_VERSION": found.cuda * 10,
        "CUDNN_VERSION": found.cudnn,
        "NCCL_VERSION": found.nccl,
        "ARCHITECTURES": ",".join(map(str, found.architectures)),
    }
    return [f"-DNULLGPU_{name}={value}" for name, value in numbers.items()]


def _build(found: Installation, folder: Path) -> None:
    """Compile the sources and the stubs, link them, and make a link for the name of each library."""
    flags = ["-O1", "-g1", "-fPIC", "-fvisibility=hidden"]
    sources = sorted((_SOURCES / "shim").glob("*.cpp"))
    objects = [folder / f"{source.stem}.o" for source in sources]
    compiling = [
        [found.compiler, "-std=c++17", *flags, "-isystem", str(found.includes), *_macros(found), "-c", str(source)]
        for source in sources
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(_run, [[*command, "-o", str(to)] for command, to in zip(compiling, objects, strict=True)]))
    libraries = needed(found)
    have = written(objects)
    (folder / "stubs.c").write_text(stubs(libraries, have), encoding="utf-8")
    (folder / "versions.map").write_text(version_script(libraries, have), encoding="utf-8")
    # Some stubs have names of built-in functions' kinds, none of which they are.
    compile_stubs = [found.compiler, "-x", "c", "-O1", "-fPIC", "-fno-builtin", "-c", str(folder / "stubs.c")]
    _run([*compile_stubs, "-o", str(folder / "stubs.o")])
    _run(
        [
            *[found.compiler, "-shared", f"-Wl,--version-script={folder / 'versions.map'}", f"-Wl,-soname,{_LIBRARY}"],
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
