"""Keeps a list of the processes that work on a study and are alive: each renews a lease, the others watch it.

A lease is seen to lapse by the watcher's own monotonic clock, and only while the study can be read: clocks of machines
need not agree, and a database outage does not expire leases. A process of the same machine is known to be gone at once.

The owner of a lease counts a lapse as soon as it may be seen, by a clock that goes on while its machine is suspended.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

from autotune.core.codec import DecodeError, decode, encode
from autotune.errors import AutotuneError
from autotune.study.problem import Sharing
from autotune.study.storage import OpenStudy

_ROW = "autotune:worker:"
_ENDED = frozenset({"Z", "X"})
"""The states of a process, in the letters of Linux, that runs no longer: zombie and dead."""


class Doing(StrEnum):
    """The activity of a worker.

    Attributes:
        SEARCHING: it probes candidates.
        ARRIVING: it is about to wait, and draws its ticket.
        WAITING: it has nothing to probe, and waits for its turn to settle, or settles.
        LEFT: it works on the study no longer.
    """

    SEARCHING = "searching"
    ARRIVING = "arriving"
    WAITING = "waiting"
    LEFT = "left"


@dataclass(frozen=True)
class Worker:
    """A worker's entry in the study.

    Attributes:
        machine: names the machine since its last start, and the namespace of its process numbers.
        started_ticks: when the process started, in the kernel's ticks since the machine did; 0 where it is not known.
            A time of day would change with every step of the machine's clock.
        renewed: changes with every renewal of the lease; a time, for those who look.
        ticket: place in the queue of those who wait, 0 for none.
    """

    key: str
    host: str
    pid: int
    machine: str
    started_ticks: int
    renewed: str
    doing: Doing = Doing.SEARCHING
    ticket: int = 0

    @property
    def name(self) -> str:
        """The worker's name in messages."""
        return f"{self.host} (process {self.pid})"


class Roster:
    """This process's place among the workers of a study; its lease is renewed while the context is active.

    Attributes:
        me: this process.
    """

    def __init__(self, opened: OpenStudy, sharing: Sharing) -> None:
        self.sharing = sharing
        self._opened = opened
        self._lock = threading.Lock()
        self._ended = threading.Event()
        # By worker, the renewal of its lease that was seen last, and how often no newer one was seen.
        self._watched: dict[str, tuple[str, int]] = {}
        self.me = Worker(
            key=_key(),
            host=socket.gethostname(),
            pid=os.getpid(),
            machine=_machine(),
            started_ticks=_started_ticks(),
            renewed=_now(),
        )
        # When the last renewal of this process's lease began, and how often the lease had lapsed by then.
        self._lease = (elapsed_seconds(), 0)
        self._lapses_before = 0
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)

    @property
    def lapses(self) -> int:
        """How often this process did not renew its lease in time, now included: others may have repeated its trial."""
        # The lock is held while the storage is written to, which may take minutes; a lease is replaced at once.
        renewed_at_seconds, lapses = self._lease
        return lapses + (elapsed_seconds() - renewed_at_seconds > self.sharing.lease_seconds)

    @property
    def lapsed(self) -> bool:
        """Whether the lease expired since this process queued, so that another may be first now."""
        return self.lapses != self._lapses_before

    def __enter__(self) -> Roster:
        """Sign in, and begin to renew the lease."""
        self._renew()
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        """Sign off."""
        self._ended.set()
        self._opened.storage.closing.set()
        self._thread.join()
        # A storage that cannot be written to is reported by the call that failed before.
        with suppress(AutotuneError):
            self.set_activity(Doing.LEFT)

    def set_activity(self, doing: Doing, ticket: int = 0) -> None:
        """Set what this process does from now on, for the others to read."""
        with self._lock:
            self.me = replace(self.me, doing=doing, ticket=ticket)
        self._renew()
        if doing is Doing.ARRIVING:
            # Whoever takes this worker for dead from now on does not wait until it has drawn.
            self._lapses_before = self.lapses

    def others(self) -> list[Worker]:
        """Return the other workers that are alive according to the study."""
        others = (worker for key, worker in self._rows().items() if key != self.me.key)
        signed_in = (worker for worker in others if worker.doing is not Doing.LEFT)
        return [worker for worker in signed_in if not _known_to_be_gone(worker, self.me.machine)]

    def _beat(self) -> None:
        while not self._ended.wait(self.sharing.interval_seconds):
            try:
                self._watch()
                self._renew()
            except (AutotuneError, MemoryError):
                # The search itself reports a storage that fails, or a lack of memory, when it next needs it.
                continue

    def _renew(self) -> None:
        with self._lock:
            # Others may see it from now on, even if the answer to the writer comes late.
            began_seconds = elapsed_seconds()
            self.me = replace(self.me, renewed=_now())
            self._write(self.me)
            self._lease = (began_seconds, self.lapses)

    def _watch(self) -> None:
        for key, worker in self._rows().items():
            renewed, missed = self._watched.get(key, ("", 0))
            missed = missed + 1 if renewed == worker.renewed else 0
            self._watched[key] = (worker.renewed, missed)
            if missed >= self.sharing.missed and worker.doing is not Doing.LEFT and key != self.me.key:
                # For those who come later; a worker that is alive after all writes its own line again.
                self._write(replace(worker, doing=Doing.LEFT))

    def _write(self, worker: Worker) -> None:
        opened = self._opened
        opened.storage.set_study_system_attr(opened.study_id, f"{_ROW}{worker.key}", encode(worker))

    def _rows(self) -> dict[str, Worker]:
        """Return the workers that are or were there, by their keys."""
        found = {}
        for name, document in self._opened.storage.get_study_system_attrs(self._opened.study_id).items():
            if name.startswith(_ROW):
                # What another version of autotune wrote is left out; its trials are of no use here.
                with suppress(DecodeError):
                    found[name.removeprefix(_ROW)] = decode(Worker, document)
        return found


def _known_to_be_gone(worker: Worker, machine: str) -> bool:
    """Whether a worker's process ran on this machine, and runs no longer."""
    if worker.machine != machine:
        return False
    try:
        state, started_ticks = _state_and_start(worker.pid)
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        # The system does not say it of the processes of other users.
        return False
    return started_ticks != worker.started_ticks or state in _ENDED


def _state_and_start(pid: int) -> tuple[str, int]:
    """Return the letter of a process's state, and the ticks between the start of its machine and its own.

    Raises:
        OSError: there is no such process, or the system does not say.
    """
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    # The second field, the name, may hold spaces and parentheses; the state is the third, the start the 22nd.
    fields = stat.rpartition(")")[2].split()
    return fields[0], int(fields[19])


def _started_ticks() -> int:
    try:
        return _state_and_start(os.getpid())[1]
    except OSError:
        # Nobody compares it: where there is no /proc, no other process calls its machine by this one's name.
        return 0


def _key() -> str:
    return uuid.uuid4().hex[:16]


def _machine() -> str:
    """Return a name that two processes share only if each can see whether the other runs."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return uuid.uuid4().hex


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")


def elapsed_seconds() -> float:
    """Return the seconds since a moment in the past, those during which the machine was suspended included.

    Where the system has no such clock, suspension is not counted.
    """
    # Linux: CLOCK_MONOTONIC, which Python's monotonic clock is, stands still while the machine is suspended.
    counting = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if counting is None else time.clock_gettime(counting)
