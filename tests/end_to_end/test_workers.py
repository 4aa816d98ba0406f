"""``autotune probe --workers 2`` on a CPU, from the command line, in real processes."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from subprocess import Popen

import optuna
import psutil
import pytest

from tests.end_to_end.runs import descendants, start, until
from tests.end_to_end.test_probe import QUICK, SPACE

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


@pytest.fixture
def words(
    small_model_directory: Path, small_dataset_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str | Path, ...]:
    """The command, for a machine with two cores at least."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two CPU cores")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    space = tmp_path / "space.yaml"
    space.write_text(SPACE, encoding="utf-8")
    limits = ("--space", space, "--trials", "12", "--output", "shared", "--workers", "2", "--json")
    return ("probe", small_model_directory, small_dataset_file, *QUICK, *limits)


def begun(folder: Path) -> int:
    return len(list((folder / "shared" / "probes").glob("*/request.json")))


def replies(folder: Path) -> dict[Path, int]:
    return {file: file.stat().st_mtime_ns for file in (folder / "shared" / "probes").glob("*/reply.json")}


def started_by(running: Popen[str], module: str) -> list[psutil.Process]:
    """Return the processes of a command that run a module."""
    return [process for process in descendants(running.pid) if module in words_of(process)]


def cores_of(running: Popen[str]) -> set[tuple[int, ...]]:
    """Return the cores that each of the processes that start probes is bound to, as soon as it has bound itself."""
    found: set[tuple[int, ...]] = set()
    for process in started_by(running, "autotune.step"):
        words = words_of(process)
        given = words[words.index("--cores") + 1] if "--cores" in words else ""
        with suppress(psutil.NoSuchProcess):
            bound = process.cpu_affinity()
            found |= {tuple(bound)} if bound == sorted(map(int, filter(None, given.split(",")))) else set()
    return found


def words_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def test_two_workers_probe_on_cores_of_their_own_and_hand_over_one_bundle(
    words: tuple[str | Path, ...], tmp_path: Path
) -> None:
    # With traces, which the first worker sends to the other.
    running = start(*(word for word in words if word != "--no-plan"), folder=tmp_path)
    until(lambda: len(cores_of(running)) == 2 and begun(tmp_path) >= 1, running)
    cores = cores_of(running)
    out, said = running.communicate(timeout=240)
    assert running.returncode == 0, said
    first, second = map(set, cores)
    assert not first & second
    document = json.loads(out)
    assert document["confirmed"]
    assert document["settings"]["workers"] == 2
    assert (tmp_path / "shared" / "config.yaml").exists()
    study = optuna.load_study(study_name=None, storage=f"sqlite:///{tmp_path / 'shared' / 'study.db'}")
    probed = [trial for trial in document["trials"] if trial["status"] != "vetoed"]
    trials = study.get_trials()
    assert len({trials[trial["number"]].user_attrs["worker"] for trial in probed}) == 2
    for trial in probed:
        assert said.count(f"probe {trial['number']} {trial['status'].replace('_', ' ')}: ") >= 1
    folders = [tmp_path / "shared" / "probes" / str(trial["number"]) / "request.json" for trial in probed]
    plans = [json.dumps(json.loads(file.read_text())["body"]["plan"], sort_keys=True) for file in folders]
    assert len(plans) == len(set(plans))


def test_ctrl_c_ends_both_workers_and_a_resumed_run_repeats_nothing_that_was_finished(
    words: tuple[str | Path, ...], tmp_path: Path
) -> None:
    running = start(*words, folder=tmp_path)
    until(lambda: begun(tmp_path) >= 4, running)
    family = descendants(running.pid)
    os.kill(running.pid, signal.SIGINT)
    _, said = running.communicate(timeout=120)
    assert running.returncode == 130
    assert "--resume" in said
    assert "Traceback" not in said
    assert "Worker 2" not in said
    _, alive = psutil.wait_procs(family, timeout=60)
    assert alive == []
    finished = replies(tmp_path)
    resumed = start(*words, "--resume", folder=tmp_path)
    out, said = resumed.communicate(timeout=240)
    assert resumed.returncode == 0, said
    assert {file: found for file, found in replies(tmp_path).items() if file in finished} == finished
    assert json.loads(out)["confirmed"]


def test_when_the_first_worker_is_killed_the_other_ends_too(words: tuple[str | Path, ...], tmp_path: Path) -> None:
    running = start(*words, folder=tmp_path)
    until(lambda: begun(tmp_path) >= 3, running)
    family = descendants(running.pid)
    running.kill()
    running.communicate()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert alive == []


def test_when_the_other_worker_is_killed_the_first_repeats_its_candidate(
    words: tuple[str | Path, ...], tmp_path: Path
) -> None:
    running = start(*words, folder=tmp_path)
    until(lambda: bool(started_by(running, "autotune.app.workers.worker")) and begun(tmp_path) >= 3, running)
    (other,) = started_by(running, "autotune.app.workers.worker")
    family = other.children(recursive=True)
    other.kill()
    out, said = running.communicate(timeout=240)
    assert running.returncode == 0, said
    assert f"(process {other.pid}) ended: signal 9. The others went on." in said
    _, alive = psutil.wait_procs(family, timeout=60)
    assert alive == []
    study = optuna.load_study(study_name=None, storage=f"sqlite:///{tmp_path / 'shared' / 'study.db'}")
    lost = [trial for trial in study.get_trials() if "autotune:lost" in trial.system_attrs]
    known = [trial["candidate"] for trial in json.loads(out)["trials"]]
    assert all(trial.user_attrs["candidate"] in known for trial in lost)
