"""The environment of the processes that a search starts, and the wait for their reports."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

import autotune
from autotune.errors import ProbeServerError
from autotune.probing import JobServer
from autotune.probing.channel import Channel, child_environment
from tests.virtual.alone import apart

MPI = [
    {"PMI_SIZE": "2", "PMI_RANK": "0"},
    {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"},
    {"MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_RANK": "0", "MPI_LOCALRANKID": "0"},
]


@pytest.mark.parametrize("launched", MPI, ids=lambda launched: next(iter(launched)))
def test_a_process_that_mpi_started_starts_processes_that_are_no_ranks(
    launched: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    assert not any(name in child_environment({}) for name in launched)


@pytest.mark.parametrize("installed", [True, False])
def test_an_installed_package_hides_no_module_of_the_standard_library_from_the_processes_it_starts(
    installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path)], check=True)
    (site_packages,) = tmp_path.glob("lib/python*/site-packages")
    (site_packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()), encoding="utf-8")
    folder = site_packages if installed else tmp_path / "checkout"
    shutil.copytree(Path(autotune.__file__).parent, folder / "autotune")
    (folder / "argparse.py").touch()
    code = (
        f"import sys; sys.path.append({str(folder)!r}); import subprocess; "
        "from autotune.probing.channel import child_environment; "
        "shown = 'import autotune, argparse; print(autotune.__file__, argparse.__file__)'; "
        "print(subprocess.check_output([sys.executable, '-P', '-c', shown], env=child_environment({}), text=True))"
    )
    python = tmp_path / "bin" / "python"
    shown = subprocess.check_output([python, "-P", "-c", code], text=True).split()
    assert shown[0] == str(folder / "autotune" / "__init__.py")
    assert shown[1].startswith(str(folder)) is not installed


def state_of(environment: Mapping[str, str]) -> tuple[int, bool] | str:
    """Return by how many processes accelerate trains in an environment, and whether as a group; or why it cannot."""
    import accelerate

    os.environ.clear()
    os.environ.update(environment)
    try:
        state = accelerate.PartialState(cpu=True)
    except ValueError as error:
        return str(error)
    return state.num_processes, state.use_distributed


def test_accelerate_takes_such_a_process_for_one_alone(job_server: JobServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for launched in MPI:
        for name, value in launched.items():
            monkeypatch.setenv(name, value)
    assert apart(job_server, state_of, child_environment({})) == (1, False)
    assert "MASTER_ADDR" in str(apart(job_server, state_of, dict(os.environ)))


LIMIT_SECONDS = 100.0


class Piped:
    """An end of a connection, whose wait takes as long as a test says.

    Attributes:
        waits: seconds that each of the next waits takes, 0 for as long as was asked; afterwards there is an event.
        waited: seconds that all of them have taken.
    """

    def __init__(self, *waits: float) -> None:
        self.waits, self.waited = list(waits), 0.0

    def poll(self, seconds: float) -> bool:
        """Wait, and return whether there is an event."""
        if not self.waits:
            return True
        self.waited += self.waits.pop(0) or seconds
        return False

    def recv(self) -> dict[str, str]:
        """Return the event."""
        return {"event": "done"}


def test_the_time_for_which_this_process_is_stopped_does_not_count_into_a_time_limit() -> None:
    piped: Any = Piped(0.0, 3600.0, 0.0)
    assert Channel(piped).receive(LIMIT_SECONDS) == {"event": "done"}


def test_a_time_limit_without_an_event_is_kept() -> None:
    piped: Any = Piped(*[0.0] * 1000)
    assert Channel(piped).receive(LIMIT_SECONDS) is None
    assert piped.waited == pytest.approx(LIMIT_SECONDS)


@pytest.mark.parametrize("seconds", [0.0, 0.01])
def test_an_event_that_is_there_is_returned_however_short_the_limit(seconds: float) -> None:
    ours, theirs = Pipe()
    with ours, theirs:
        assert Channel(ours).receive(seconds) is None
        theirs.send({"event": "done"})
        assert Channel(ours).receive(seconds) == {"event": "done"}


@pytest.mark.parametrize(("content", "reason"), [(None, "No such file"), ("", "Permission denied")])
def test_a_python_that_cannot_be_executed_is_named(
    content: str | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    if content is not None:
        python.write_text(content)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(ProbeServerError, match=rf"{python}, cannot be started: {reason}"):
        JobServer("cpu")
