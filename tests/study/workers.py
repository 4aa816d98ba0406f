"""Starts several processes that search one study, kills some of them, and checks the result."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import optuna

from autotune.core.candidate import Candidate
from autotune.core.files.codec import decode
from autotune.study.problem import Purpose, SearchOutcome
from tests.study.replayed import TableProblem
from tests.study.running import probed

_LONGEST_SECONDS = 240


@dataclass
class Workers:
    """Processes that search one study.

    Attributes:
        folder: for their log and their outcomes.
        lease_seconds: after which one that shows no sign of life is taken for dead; as long as it is, none is that is
            only slow, and one that has ended is seen to by its process.
        apart: whether they know of one another by the study alone, as on machines of their own.
    """

    url: str
    folder: Path
    trials: int = 12
    probe_seconds: float = 0.2
    lease_seconds: float = 36_000.0
    apart: bool = False
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def log(self) -> Path:
        """Where they write what they probe."""
        return self.folder / "log"

    def start(self, count: int, moments: Iterable[int] = ()) -> None:
        """Start some; see :meth:`held_after` for the moments."""
        for moment in moments:
            self._hold(moment).touch()
        for _ in range(count):
            result = self.folder / f"outcome-{len(self.processes)}"
            arguments = [self.url, self.log, result, self.trials, self.probe_seconds, self.lease_seconds]
            command = [sys.executable, "-m", "tests.study.worker", *map(str, arguments)]
            command += ["apart"] if self.apart else []
            self.processes.append(subprocess.Popen(command, stderr=subprocess.PIPE))

    def lines(self) -> list[list[str]]:
        """Return what was logged, by words: process, what, …."""
        text = self.log.read_text() if self.log.exists() else ""
        return [line.split(maxsplit=3) for line in text.rpartition("\n")[0].splitlines()]

    def until(self, reached: Callable[[list[list[str]]], bool]) -> None:
        """Wait until the lines of the log meet a condition."""
        deadline = time.monotonic() + _LONGEST_SECONDS
        while not reached(self.lines()):
            assert time.monotonic() < deadline, self.lines()
            self.assert_running()
            time.sleep(0.02)

    def until_ended(self, count: int) -> None:
        """Wait until this many probes have ended."""
        self.until(lambda lines: sum(words[1] == "ends" for words in lines) >= count)

    @contextmanager
    def held_after(self, moment: int) -> Iterator[None]:
        """Wait until this many probes have ended, and let no further one end in this context."""
        self.until_ended(moment)
        yield
        self._hold(moment).unlink()

    def _hold(self, moment: int) -> Path:
        return self.folder / f"hold.{moment}"

    def assert_running(self) -> None:
        """Fail with its message if one of them failed."""
        for process in self.processes:
            if process.poll() not in (None, 0, -signal.SIGKILL):
                assert process.stderr is not None
                raise AssertionError(process.stderr.read().decode())

    def kill(self, chance: random.Random) -> None:
        """Kill one with -9, in the middle of a probe, and wait until it is gone: another kill would choose it again."""
        self.strike(signal.SIGKILL, chance).wait()

    def strike(self, number: signal.Signals, chance: random.Random) -> subprocess.Popen[bytes]:
        """Send a signal to one of those that probe at this moment, and return it.

        One that was chosen before might have no probe left to begin: the others are quick, or it starts just now.
        """
        found: list[subprocess.Popen[bytes]] = []

        def some_probe(lines: list[list[str]]) -> bool:
            found[:] = self._probing(lines)
            return bool(found)

        while True:
            self.until(some_probe)
            struck = chance.choice(found)
            # It may have ended its probe since the log was read, so it is stopped before the log is read again.
            struck.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, struck.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            if struck in self._probing(self.lines()):
                struck.send_signal(number)
                return struck
            struck.send_signal(signal.SIGCONT)

    def _probing(self, lines: list[list[str]]) -> list[subprocess.Popen[bytes]]:
        """Return those that run and are in the middle of a probe, by what was logged."""
        last = {words[0]: words[1] for words in lines if words[1] in ("begins", "ends")}
        return [each for each in self.processes if each.poll() is None and last.get(str(each.pid)) == "begins"]

    def outcomes(self) -> list[SearchOutcome]:
        """Wait for all to end, and return the outcomes of those that were not killed."""
        found = []
        for index, process in enumerate(self.processes):
            _, said = process.communicate(timeout=_LONGEST_SECONDS)
            assert process.returncode in (0, -signal.SIGKILL), said.decode()
            if process.returncode == 0:
                found.append(decode(SearchOutcome, json.loads((self.folder / f"outcome-{index}").read_text())))
        return found

    def end(self) -> None:
        """End those that still run."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.communicate()


def assert_shared(workers: Workers, outcomes: list[SearchOutcome], study: optuna.Study) -> list[int]:
    """Check that nothing finished was lost, that nothing ran twice, and that all have the same result.

    Returns:
        The trials whose worker was killed.
    """
    first, lines = outcomes[0], workers.lines()
    assert all(outcome == first for outcome in outcomes)
    assert first.winner is not None
    assert first.confirmed
    assert not first.interrupted
    ended = [words for words in lines if words[1] == "ends"]
    probes = [int(words[2]) for words in ended if words[3] not in (Purpose.CONFIRMATION, Purpose.COMPARISON)]
    assert len(probes) == len(set(probes))
    recorded = {record.number for record in probed(first)}
    # A kill may come right after the end of a probe, before its measurement is stored: it had not finished.
    killed = {str(process.pid) for process in workers.processes if process.returncode == -signal.SIGKILL}
    last = {int(words[2]) for pid in killed for words in [words for words in lines if words[0] == pid][-1:]}
    lost = set(probes) - recorded
    assert recorded <= set(probes)
    assert lost <= last, lost
    assert len(recorded) == workers.trials
    identity = TableProblem().identity
    plans = Counter(identity(record.candidate) for record in probed(first))
    assert set(plans.values()) == {1}
    after = Counter(tuple(words[2:]) for words in ended if words[3] in (Purpose.CONFIRMATION, Purpose.COMPARISON))
    confirmations = {key: count for key, count in after.items() if key[1] == Purpose.CONFIRMATION}
    assert set(confirmations.values()) == {1}
    trials = study.get_trials(deepcopy=False)
    assert not [trial for trial in trials if not trial.state.is_finished()]
    begun = [int(words[2]) for words in lines if words[1] == "begins" and int(words[2]) not in recorded]
    # What a worker was killed over is repeated by another, maybe as another candidate with the same plan.
    repeated = {identity(decode(Candidate, trials[number].user_attrs["candidate"])) for number in begun}
    assert repeated <= {identity(record.candidate) for record in first.records}
    return begun
