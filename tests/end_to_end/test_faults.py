"""Faults during a search: no finished probe is lost, and a fatal fault gives one message."""

from __future__ import annotations

import contextlib
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.end_to_end.runs import Ended, autotune, descendants, start, until
from tests.end_to_end.test_probe import QUICK, SPACE
from tests.study.postgres import Postgres, lacking

pytestmark = [pytest.mark.nightly, pytest.mark.slow]

STOPPED_SECONDS = 10.0
# The time of day, for the process and all that it starts, is off by the seconds in a file.
CLOCK = """
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
    long off = 0;
    int failed = syscall(SYS_clock_gettime, clock, now);
    FILE *file = clock == CLOCK_REALTIME ? fopen(getenv("CLOCK_OFF"), "r") : NULL;
    if (file != NULL) {
        if (fscanf(file, "%ld", &off) == 1) now->tv_sec += off;
        fclose(file);
    }
    return failed;
}
"""


@dataclass
class Search:
    """A search in a folder, which a test disturbs, and then resumes."""

    folder: Path
    words: tuple[str | Path, ...]

    @property
    def output(self) -> Path:
        """Its output directory."""
        return self.folder / "out"

    def begin(self, *words: str) -> subprocess.Popen[str]:
        """Start it, and wait until the second probe runs."""
        self.words += words
        running = start(*self.words, folder=self.folder)
        self.wait_for(2, running)
        return running

    def wait_for(self, probes: int, running: subprocess.Popen[str]) -> None:
        """Wait until this number of probes have begun."""
        until(lambda: len(list(self.output.glob("probes/*/request.json"))) >= probes, running)

    def replies(self) -> dict[Path, int]:
        """Return when each finished probe replied."""
        return {file: file.stat().st_mtime_ns for file in self.output.glob("probes/?/reply.json")}

    def resume(self) -> Ended:
        """Run the same command again."""
        return autotune(*self.words, "--resume", folder=self.folder, timeout=600)


Made = Callable[[Path], Search]


@pytest.fixture
def made(small_model_directory: Path, small_dataset_file: Path, tmp_path: Path) -> Made:
    """Make a search in a folder."""
    space = tmp_path / "space.yaml"
    space.write_text(SPACE, encoding="utf-8")
    limits = ("--space", space, "--trials", "4", "--memory-budget", "2GiB", "--output", "out", "--json")
    return lambda folder: Search(folder, ("probe", small_model_directory, small_dataset_file, *QUICK, *limits))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 20 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a disk cannot be mounted: root is needed")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(filler: Path) -> None:
    """Write a file until its disk is full."""
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def fails_in_a_sentence(running: subprocess.Popen[str]) -> str:
    """Wait for the end of a search that cannot continue, and return its last output."""
    _, err = running.communicate(timeout=300)
    assert running.returncode == 2, err
    assert "Traceback" not in err
    return err.splitlines()[-1]


def goes_on(search: Search, finished: dict[Path, int]) -> None:
    """Check that a resumed search ends well, and repeats no probe that was finished."""
    resumed = search.resume()
    assert resumed.code == 0, resumed.err
    assert {file: file.stat().st_mtime_ns for file in finished} == finished
    assert len([trial for trial in resumed.document["trials"] if trial["status"] == "ok"]) == 4


def ends_well(running: subprocess.Popen[str]) -> None:
    """Check that a search ends as if nothing had been."""
    _, err = running.communicate(timeout=600)
    assert running.returncode == 0, err
    begun = [line.split()[1] for line in err.splitlines() if "started (" in line]
    assert len(begun) == len(set(begun)) == 4


@pytest.mark.parametrize("apart", [False, True], ids=["study on it", "study elsewhere"])
def test_a_full_disk(made: Made, small_disk: Path, tmp_path: Path, apart: bool) -> None:
    search = made(small_disk)
    running = search.begin(*(("--storage", f"sqlite:///{tmp_path}/study.db") if apart else ()))
    finished = {file: seconds for file, seconds in search.replies().items() if file.parent.name == "0"}
    filler = small_disk / "filler"
    fill(filler)
    last = fails_in_a_sentence(running)
    assert any(reason in last for reason in ("No space left on device", "disk is full"))
    assert "--resume" in last
    filler.unlink()
    goes_on(search, finished)


def test_a_removed_output_folder(made: Made, tmp_path: Path) -> None:
    search = made(tmp_path)
    running = search.begin("--storage", f"sqlite:///{tmp_path}/study.db")
    shutil.rmtree(search.output)
    assert " removed" in fails_in_a_sentence(running)
    goes_on(search, {})
    # The study has the first probe.
    assert not (search.output / "probes" / "0" / "reply.json").exists()


@pytest.mark.parametrize("which", ["command", "server", "probe", "all"])
def test_processes_that_are_stopped_for_a_while(made: Made, tmp_path: Path, which: str) -> None:
    running = made(tmp_path).begin()
    command = psutil.Process(running.pid)
    parts = {"command": [command], "server": command.children(), "probe": [*descendants(running.pid)[1:]]}
    stopped = [each for part in parts.values() for each in part] if which == "all" else parts[which]
    for signalled in (signal.SIGSTOP, signal.SIGCONT):
        for process in stopped:
            if process.is_running():
                process.send_signal(signalled)
        time.sleep(STOPPED_SECONDS if signalled is signal.SIGSTOP else 0)
    ends_well(running)


def test_a_clock_that_jumps(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("there is no gcc, to replace the clock of a process")
    source, library, off = (tmp_path / name for name in ("clock.c", "clock.so", "off"))
    source.write_text(CLOCK, encoding="utf-8")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    off.write_text("0", encoding="ascii")
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("CLOCK_OFF", str(off))
    search = made(tmp_path)
    running = search.begin()
    for probes, days in ((2, 3), (3, -3)):
        search.wait_for(probes, running)
        off.write_text(str(days * 86_400), encoding="ascii")
    shown = subprocess.run(["date", "+%s"], capture_output=True, text=True, check=True).stdout
    assert int(shown) < time.clock_gettime(time.CLOCK_REALTIME) - 2 * 86_400
    ends_well(running)


def test_a_limit_of_memory_that_the_command_itself_meets(made: Made, tmp_path: Path) -> None:
    search = made(tmp_path)
    running = search.begin()
    finished = {file: seconds for file, seconds in search.replies().items() if file.parent.name == "0"}
    used = psutil.Process(running.pid).memory_info().vms
    resource.prlimit(running.pid, resource.RLIMIT_AS, (used, used))
    last = fails_in_a_sentence(running)
    assert "out of memory" in last
    assert "--resume" in last
    goes_on(search, finished)


def test_a_database_that_restarts(made: Made, tmp_path: Path) -> None:
    if why := lacking():
        pytest.skip(why)
    server = Postgres()
    try:
        running = made(tmp_path).begin("--storage", server.url)
        server.stop()
        time.sleep(STOPPED_SECONDS)
        server.start()
        ends_well(running)
    finally:
        server.remove()
