"""Null GPUs also replace NVIDIA's own libraries if pip has installed them."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest

from tests.nullgpu.machine import NEEDS_CUDA_BUILD, NullMachine

pytestmark = NEEDS_CUDA_BUILD

LIBRARY = "int cudaGetDeviceCount(int *count) { *count = 99; return 0; }\n"
PROGRAM = """
#include <stdio.h>
int cudaGetDeviceCount(int *);
int main(void) {
    int count = -1, code = cudaGetDeviceCount(&count);
    printf("%d %d\\n", code, count);
}
"""


def test_the_shim_comes_before_a_library_that_the_rpath_finds(machine: NullMachine, tmp_path: Path) -> None:
    """PyTorch's libraries have an RPATH (not a RUNPATH), which comes before LD_LIBRARY_PATH."""
    folder = tmp_path / "nvidia"
    folder.mkdir()
    (tmp_path / "library.c").write_text(LIBRARY)
    (tmp_path / "program.c").write_text(PROGRAM)
    soname = "libcudart.so.13"
    version = tmp_path / "versions.map"
    version.write_text(f"{soname} {{ global: cudaGetDeviceCount; }};\n")
    library = ["-shared", "-fPIC", f"-Wl,-soname,{soname}", f"-Wl,--version-script={version}"]
    rpath = ["-Wl,--disable-new-dtags", f"-Wl,-rpath,{folder}"]
    gcc(*library, str(tmp_path / "library.c"), "-o", str(folder / soname))
    gcc(*rpath, str(tmp_path / "program.c"), str(folder / soname), "-o", str(tmp_path / "program"))
    assert shown(tmp_path / "program", None) == "0 99"
    variables = machine.environment(count=3)
    assert shown(tmp_path / "program", variables) == "0 3"
    del variables["LD_PRELOAD"]
    assert shown(tmp_path / "program", variables) == "0 99"


@pytest.mark.skipif(importlib.util.find_spec("nvidia") is None, reason="needs NVIDIA's libraries: make test-nvidia")
def test_no_library_of_nvidia_is_mapped_where_pip_has_installed_them(machine: NullMachine) -> None:
    program = """
        import json, torch
        a = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        torch.nn.functional.scaled_dot_product_attention(a[None, None], a[None, None], a[None, None]).sum().backward()
        (a @ a).sum().backward()
        torch.optim.AdamW([a], fused=True).step()
        with open("/proc/self/maps") as maps:
            print(json.dumps(sorted({line.split()[-1] for line in maps if "/nvidia/" in line})))
    """
    assert machine.run(program) == []


def gcc(*arguments: str) -> None:
    """Compile."""
    subprocess.run(["gcc", *arguments], check=True)


def shown(program: Path, variables: dict[str, str] | None) -> str:
    """Return what a program prints."""
    return subprocess.run([program], env=variables, capture_output=True, text=True, check=True).stdout.strip()
