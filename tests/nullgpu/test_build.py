"""The build of a null GPU: called functions, stubs, refusals, and one error that lists what is missing."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.errors import AutotuneError, InputError
from autotune.nullgpu import installation as module
from autotune.nullgpu.build import SONAMES, build_library
from autotune.nullgpu.installation import Installation, installation
from autotune.nullgpu.symbols import called_functions, library_of, refusal, stubs, version_script
from tests.nullgpu.machine import NEEDS_CUDA_BUILD, ROOT, NullMachine

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
_, needs_cuda_build = NEEDS_CUDA_BUILD

MODULE = """
int cudaMalloc(void **, unsigned long);
int cudaGraphLaunch(void *, void *);
int nvmlInit_v2(void);
int call(void) { return cudaMalloc(0, 0) + cudaGraphLaunch(0, 0) + nvmlInit_v2(); }
"""
RUNTIME = (
    "int cudaMalloc(void **a, unsigned long b) { return 0; }\nint cudaGraphLaunch(void *a, void *b) { return 0; }\n"
)


@pytest.fixture
def small(tmp_path: Path) -> Installation:
    """A library that calls three functions, two of them in a version of a runtime of its own."""
    (tmp_path / "runtime.c").write_text(RUNTIME)
    (tmp_path / "module.c").write_text(MODULE)
    (tmp_path / "driver.c").write_text("void launch(void) { cuLaunchKernelEx(); }\n")
    (tmp_path / "map").write_text("RUNTIME_21 { global: cuda*; };\n")
    shared, runtime = ["gcc", "-shared", "-fPIC"], str(tmp_path / "libcudart.so.21")
    version = ["-Wl,-soname,libcudart.so.21", f"-Wl,--version-script={tmp_path / 'map'}"]
    subprocess.run([*shared, *version, str(tmp_path / "runtime.c"), "-o", runtime], check=True)
    called = tmp_path / "libcalls.so"
    subprocess.run([*shared, str(tmp_path / "module.c"), runtime, "-o", str(called)], check=True)
    return Installation((called,), tmp_path, tmp_path / "driver.c", "g++", "", 21000, 90000, 22000, (90,))


@needs_compiler
def test_functions_are_found_with_the_library_and_the_version_that_modules_name(small: Installation) -> None:
    libraries = called_functions(small)
    assert libraries["libcudart"].soname == "libcudart.so.21"
    assert libraries["libcudart"].versions == {"RUNTIME_21": {"cudaMalloc", "cudaGraphLaunch"}}
    assert libraries["libnvidia-ml"].functions() == {"nvmlInit_v2"}
    assert libraries["libcuda"].functions() == {"cuLaunchKernelEx"}


@needs_compiler
def test_what_nobody_wrote_is_a_stub_or_refused(small: Installation) -> None:
    libraries, have = called_functions(small), {"cudaMalloc", "cudaFree", "nullgpu_refuse"}
    source = stubs(libraries, have)
    assert "long nvmlInit_v2(void) { return 0; }" in source
    assert 'return nullgpu_refuse("cudaGraphLaunch", "CUDA graphs", 801);' in source
    assert "cudaMalloc" not in source
    script = version_script(libraries, have)
    assert re.search(r"^RUNTIME_21 .*cudaFree; cudaGraphLaunch; cudaMalloc;", script, re.MULTILINE)
    assert re.search(r"^NULLGPU .*nullgpu_refuse;", script, re.MULTILINE)
    assert script.count("local: *;") == 1


@pytest.mark.parametrize(
    ("function", "library"),
    [("cuInit", "libcuda"), ("cudaMalloc", "libcudart"), ("cublasLtMatmul", "libcublasLt"), ("cufftExec", "libcufft"),
     ("cuFileRead", "libcufile"), ("cusparseLtInit", "libcusparseLt"), ("malloc", None)],
)  # fmt: skip
def test_a_function_is_of_the_library_that_its_name_begins_with(function: str, library: str | None) -> None:
    assert library_of(function) == library


@pytest.mark.parametrize(
    "function",
    ["cudaStreamIsCapturing", "cudaThreadExchangeStreamCaptureMode", "cusparseCreate", "ncclAllReduce", "cuMemMap"],
)
def test_what_every_program_calls_is_not_refused(function: str) -> None:
    assert refusal(function) is None


@pytest.mark.parametrize(
    ("function", "feature"),
    [("cudaGraphLaunch", "CUDA graphs"), ("ncclCommInitAll", "DataParallel"), ("ncclMemAlloc", "registered buffers")],
)
def test_a_refusal_names_what_a_script_used(function: str, feature: str) -> None:
    refused = refusal(function)
    assert refused is not None
    assert feature in refused.belongs_to


def test_one_error_names_all_that_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "torch_cuda_version", lambda: None)
    monkeypatch.setattr(
        "autotune.nullgpu.installation.shutil.which", lambda name: None if name in {"g++", "nm"} else name
    )
    monkeypatch.setattr("autotune.nullgpu.installation.platform.machine", lambda: "aarch64")
    with pytest.raises(InputError) as caught:
        installation()
    assert re.match(
        r"A null GPU needs Linux on x86-64 \(this is Linux on aarch64\),"
        r" a CUDA build of PyTorch \(torch \S+ is installed\), g\+\+ \(a C\+\+ compiler\), nm \(of binutils\)",
        caught.value.message,
    )


def test_a_build_for_another_cuda_is_refused_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "torch_cuda_version", lambda: "12.6")
    with pytest.raises(InputError, match=r"a build of PyTorch for CUDA 13 \(torch \S+ is for CUDA 12\.6\)"):
        installation()


@pytest.mark.cuda_build
@needs_cuda_build
def test_versions_are_those_of_the_installed_pytorch(machine: NullMachine) -> None:
    found = installation()
    program = """
        import json, torch
        from torch.cuda import nccl
        compiled = torch._C._cudnn.getCompileVersion()
        print(json.dumps([torch.cuda.get_arch_list(), torch.version.cuda, nccl.version(), compiled,
                          torch.backends.cudnn.version()]))
    """
    architectures, cuda, nccl, compiled_cudnn, cudnn = machine.run(program)
    assert [f"sm_{number}" for number in found.architectures] == architectures
    assert tuple(map(int, cuda.split("."))) == (found.cuda // 1000, found.cuda % 1000 // 10)
    assert nccl == [found.nccl // 10000, found.nccl // 100 % 100, found.nccl % 100]
    assert cudnn == found.cudnn == compiled_cudnn[0] * 10000 + compiled_cudnn[1] * 100 + compiled_cudnn[2]


@pytest.mark.cuda_build
@pytest.mark.nightly
@needs_cuda_build
def test_the_library_is_built_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = build_library()
    assert folder.is_relative_to(tmp_path / "autotune" / "nullgpu")
    sonames = (folder / SONAMES).read_text().split()
    assert {"libcuda.so.1", "libnvidia-ml.so.1", "libcudart.so.13", "libnccl.so.2"} <= set(sonames)
    assert all((folder / soname).samefile(folder / "libnullgpu.so") for soname in sonames)
    before = (folder / "libnullgpu.so").stat().st_mtime_ns
    assert build_library() == folder
    assert (folder / "libnullgpu.so").stat().st_mtime_ns == before
    assert [each.name for each in folder.parent.iterdir()] == [folder.name]


@pytest.mark.cuda_build
@pytest.mark.nightly
@needs_cuda_build
def test_a_compiler_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = installation()
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr("autotune.nullgpu.build.installation", lambda: replace(found, includes=tmp_path / "empty"))
    with pytest.raises(AutotuneError, match=r"The null GPU could not be built: .*cuda"):
        build_library()
    assert list((tmp_path / "autotune" / "nullgpu").iterdir()) == []


@pytest.mark.parametrize("unusable", ["no home", "a file"])
def test_a_cache_that_cannot_be_written_is_the_users_to_change(
    unusable: str, small: Installation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("autotune.nullgpu.build.installation", lambda: small)
    monkeypatch.setattr(Path, "home", homeless)
    # Any directory is writable for root, as whom tests may run.
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", "" if unusable == "no home" else str(tmp_path / "file"))
    with pytest.raises(InputError) as caught:
        build_library()
    assert "XDG_CACHE_HOME" in caught.value.hint


def test_every_file_of_the_shim_says_its_reason_in_its_first_line() -> None:
    files = sorted((ROOT / "autotune" / "nullgpu" / "shim").iterdir())
    assert len(files) > 20
    for file in files:
        lines = file.read_text(encoding="utf-8").splitlines()
        assert lines[0].startswith("// "), file
        assert len(lines) <= 400, file
