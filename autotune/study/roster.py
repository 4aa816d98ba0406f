"""Tracks the live worker processes of a study: each renews a lease, which the others watch.

Watchers detect a lapsed lease by missed renewals in their own monotonic time, and only while the study can be read:
machines' clocks need not agree, and a database outage does not expire leases. The end of a process on the same machine
is detected at once.

The owner of a lease counts a lapse as soon as others may detect it, by a clock that includes suspension of its machine.
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

import psutil

from autotune.core.files.codec import DecodeError, decode, encode
from autotune.errors import AutotuneError
from autotune.study.problem import Sharing
from autotune.study.storage import OpenStudy

_ROW = "autotune:worker:"
_ENDED = frozenset({psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD})


class Activity(StrEnum):
    """The activity of a worker.

    Attributes:
        SEARCHING: probes candidates.
        ARRIVING: draws its ticket, before it waits.
        WAITING: has nothing to probe; waits for its turn to settle, or settles.
        LEFT: has left the study.
    """

    SEARCHING = "searching"
    ARRIVING = "arriving"
    WAITING = "waiting"
    LEFT = "left"


@dataclass(frozen=True)
class Worker:
    """A worker's entry in the study.

    Attributes:
        machine: boot id of the machine and PID namespace.
        renewed: the time of the last renewal; only compared for equality.
        ticket: place in the queue of waiting workers, 0 for none.
    """

    key: str
    host: str
    pid: int
    machine: str
    renewed: str
    doing: Activity = Activity.SEARCHING
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
        # By worker, its last observed renewal, and the number of checks since without a newer one.
        self._watched: dict[str, tuple[str, int]] = {}
        self.me = Worker(key=_key(), host=socket.gethostname(), pid=os.getpid(), machine=_machine(), renewed=_now())
        # Start of this process's last renewal, and the number of lapses by then.
        self._lease = (elapsed_seconds(), 0)
        self._lapses_before = 0
        self._thread = threading.Thread(target=self._renew_periodically, name="lease", daemon=True)

    @property
    def lapses(self) -> int:
        """Number of lapses of this process's lease, including a current one; others may have repeated its trial."""
        # Without the lock, which is held during writes of minutes; the tuple is replaced atomically.
        renewed_at_seconds, lapses = self._lease
        return lapses + (elapsed_seconds() - renewed_at_seconds > self.sharing.lease_seconds)

    @property
    def lapsed(self) -> bool:
        """Whether the lease lapsed since this process queued, so that another may be first now."""
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
        # The call that failed before has reported a storage that cannot be written to.
        with suppress(AutotuneError):
            self.set_activity(Activity.LEFT)

    def set_activity(self, doing: Activity, ticket: int = 0) -> None:
        """Publish this process's activity to the other workers."""
        with self._lock:
            self.me = replace(self.me, doing=doing, ticket=ticket)
        self._renew()
        if doing is Activity.ARRIVING:
            # Workers that consider this one dead from now on do not wait for its ticket.
            self._lapses_before = self.lapses

    def others(self) -> list[Worker]:
        """Return the other workers that are alive according to the study."""
        others = (worker for key, worker in self._rows().items() if key != self.me.key)
        signed_in = (worker for worker in others if worker.doing is not Activity.LEFT)
        return [worker for worker in signed_in if not _has_ended(worker, self.me.machine)]

    def _renew_periodically(self) -> None:
        while not self._ended.wait(self.sharing.interval_seconds):
            try:
                self._watch()
                self._renew()
            except (AutotuneError, MemoryError):
                # The search itself reports a failing storage, or a lack of memory, at its next use.
                continue

    def _renew(self) -> None:
        with self._lock:
            # The renewal may be visible from now on, even if the storage's reply is late.
            began_seconds = elapsed_seconds()
            self.me = replace(self.me, renewed=_now())
            self._write(self.me)
            self._lease = (began_seconds, self.lapses)

    def _watch(self) -> None:
        for key, worker in self._rows().items():
            renewed, missed = self._watched.get(key, ("", 0))
            missed = missed + 1 if renewed == worker.renewed else 0
            self._watched[key] = (worker.renewed, missed)
            if missed >= self.sharing.missed and worker.doing is not Activity.LEFT and key != self.me.key:
                # For workers that join later; a worker that is alive after all overwrites this.
                self._write(replace(worker, doing=Activity.LEFT))

    def _write(self, worker: Worker) -> None:
        opened = self._opened
        opened.storage.set_study_system_attr(opened.study_id, f"{_ROW}{worker.key}", encode(worker))

    def _rows(self) -> dict[str, Worker]:
        """Return all present and former workers by key."""
        found = {}
        for name, document in self._opened.storage.get_study_system_attrs(self._opened.study_id).items():
            if name.startswith(_ROW):
                # Skip entries of other versions of autotune, whose trials cannot be used.
                with suppress(DecodeError):
                    found[name.removeprefix(_ROW)] = decode(Worker, document)
        return found


def _has_ended(worker: Worker, machine: str) -> bool:
    """Whether a worker's process was on this machine and has ended.

    If another process has its number, the lapse of its lease shows it, as on another machine.
    """
    if worker.machine != machine:
        return False
    try:
        return psutil.Process(worker.pid).status() in _ENDED
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied:
        return False


def _key() -> str:
    return uuid.uuid4().hex[:16]


def _machine() -> str:
    """Return a name that is equal for two processes only if each can observe the other's process."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return uuid.uuid4().hex


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")


def elapsed_seconds() -> float:
    """Return the seconds since a fixed moment in the past, including suspension of the machine."""
    # CLOCK_MONOTONIC, Python's monotonic clock, does not advance while the machine is suspended.
    return time.clock_gettime(time.CLOCK_BOOTTIME)
