"""The Python of a command is found from its words, and missing requirements give one message."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from autotune.errors import AutotuneError, InputError
from autotune.inspection.software import torch_cuda_version
from autotune.nullgpu.interpreter import interpreter, library_folder


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A Python of another environment."""
    return program(tmp_path / "bin" / "python3", "#!/bin/sh\necho 'no such thing' >&2\nexit 3\n")


@pytest.mark.parametrize(
    "first",
    ["#!{python}\n", "#!{python} -s\n", "#!/usr/bin/env python3\n", '#!/bin/sh\n\'\'\'exec\' "{python}" "$0" "$@"\n'],
    ids=["path", "options", "env", "long"],
)
def test_a_launcher_names_its_python_in_its_first_lines(
    python: Path, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = program(python.with_name("accelerate"), first.format(python=python))
    monkeypatch.setenv("PATH", str(python.parent))
    assert interpreter([str(launcher), "launch"], {}) == python
    assert interpreter(["accelerate", "launch"], {"PATH": str(python.parent)}) == python


def test_python_is_itself_behind_variables_too(python: Path) -> None:
    variables = {"PATH": str(python.parent)}
    assert interpreter(["python3", "train.py"], variables) == python
    assert interpreter(["env", "A=1", "python3", "train.py"], variables) == python
    assert interpreter(["A=1", str(python), "train.py"], {}) == python
    assert interpreter(["env", "-i", "-u", "B", "--unset=C", "A=1", "python3", "train.py"], variables) == python


def test_a_program_that_can_be_run_and_not_read_is_taken_to_run_the_python_on_the_path(
    python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealed = program(python.with_name("sealed"), "#!/bin/sh\n")
    named = program(python.with_name("python"), "#!/bin/sh\n")

    def refuse(path: Path, mode: str) -> None:
        raise PermissionError(path)

    monkeypatch.setattr(Path, "open", refuse)
    assert interpreter([str(sealed)], {"PATH": str(python.parent)}) == named


def test_the_module_that_builds_the_library_needs_no_package_of_autotunes_requirements() -> None:
    """It runs in the environment of a training, which may have PyTorch and Triton alone."""
    script = "import sys; sys.modules.update(yaml=None, psutil=None); import autotune.nullgpu.build"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_another_program_is_taken_to_run_the_python_on_the_path(python: Path) -> None:
    script = program(python.with_name("run.sh"), "#!/bin/sh\npython train.py\n")
    named = program(python.with_name("python"), "#!/bin/sh\n")
    assert interpreter([str(script)], {"PATH": str(python.parent)}) == named


def test_a_program_that_is_not_there_is_named() -> None:
    with pytest.raises(InputError, match="The program no-such-launcher cannot be found"):
        interpreter(["no-such-launcher", "train.py"], {"PATH": ""})


def test_a_python_that_cannot_prepare_null_gpus_is_named_with_its_last_words(python: Path) -> None:
    with pytest.raises(InputError, match=r"bin/python3 cannot prepare null GPUs: no such thing"):
        library_folder(python, {})


@pytest.mark.skipif(torch_cuda_version() is not None, reason="holds of PyTorch's CPU build")
def test_an_environment_without_a_cuda_build_is_told_in_one_sentence() -> None:
    with pytest.raises(InputError, match=r"A null GPU needs a CUDA build of PyTorch \(torch \S+ is installed\)"):
        library_folder(Path(sys.executable), {})


@pytest.mark.skipif(torch_cuda_version() is not None, reason="holds of PyTorch's CPU build")
def test_what_lacks_in_another_environment_is_told_with_its_python(tmp_path: Path) -> None:
    other = program(tmp_path / "bin" / "python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    with pytest.raises(AutotuneError, match=r"needs a CUDA build of PyTorch .* the environment of .*/bin/python\."):
        library_folder(other, {"PATH": "/usr/bin:/bin"})
