"""Connects to a study storage by URL: a database, a journal file, or Optuna's gRPC proxy."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, IntegrityError, NoSuchModuleError, SQLAlchemyError

from autotune.confidential import hidden, hidden_url, secrets_in
from autotune.errors import InputError, causes
from autotune.inspection.paths import user_path
from autotune.study.retrying import is_transient

JOURNAL, GRPC = "journal://", "grpc://"
_ENTRY = b'{"op_code"'
"""First bytes of every line of a journal."""
_CHOOSE = "Choose another --storage or --output."
_EXAMPLES = (
    "Write for instance sqlite:///study.db, journal:///shared/study.log, postgresql+psycopg://user@host/name or "
    "grpc://host:13000."
)
_CONNECT_SECONDS = 10
_LIBPQ_TIMEOUTS = {
    "connect_timeout": _CONNECT_SECONDS,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}
"""libpq's parameters: the connection to a server that no longer answers times out within a minute.

With Linux's defaults, that takes 15 minutes, or 2 hours if the server has received the query.
"""
_CREATION_SECONDS = 3.0
"""Time for another process to create the tables of a database, which Optuna does not do in one transaction."""

_DEFAULT_PORT = 13000
"""Port of ``optuna.storages.run_grpc_proxy_server``."""


def connected(url: str, patience_seconds: float = 0.0) -> tuple[BaseStorage, Callable[[], object]]:
    """Return the storage of a URL, and a function that closes it.

    Args:
        patience_seconds: time for which a connection to a database that is restarting is retried.

    Raises:
        InputError: the URL is invalid, or the storage cannot be reached.
    """
    if url.startswith(JOURNAL):
        return _journal(url), lambda: None
    if url.startswith(GRPC):
        return _proxy(url)
    if is_in_memory(url):
        return optuna.storages.InMemoryStorage(), lambda: None
    return _database(url, patience_seconds)


def is_in_memory(url: str) -> bool:
    """Whether a URL names a database in the memory of the process that opens it."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        return False
    database = parsed.database or ""
    if "uri" in parsed.query:
        database = database.removeprefix("file:")
    in_memory = database in ("", ":memory:") or parsed.query.get("mode") == "memory"
    return parsed.get_backend_name() == "sqlite" and in_memory


def cause_of(error: BaseException, url: str = "") -> str:
    """Return the storage's own message: the innermost of Optuna's, SQLAlchemy's and the driver's exceptions.

    Args:
        url: of the storage; its secrets are removed from the message.
    """
    return hidden(_message_of(error), secrets_in(url))


def _message_of(error: BaseException) -> str:
    *_, error = causes(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    # The text of a failed gRPC call has several lines of state.
    details = getattr(error, "details", None)
    text = str(details() if callable(details) else error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__


def _unusable(url: str, why: str, hint: str = _CHOOSE) -> InputError:
    return InputError(f"The study storage {hidden_url(url)} cannot be used: {why}.", hint=hint)


class _RepairingLock(JournalFileSymlinkLock):
    """Write lock of a journal that removes an incomplete last line on acquisition.

    An earlier write, for instance to a full disk, may leave such a line. Optuna 5.0 (``storages/journal/_file.py``)
    would append to it, which loses the next entry and makes the journal unreadable.
    """

    def acquire(self) -> bool:
        """Wait for the lock, then remove a last line without an end.

        Raises:
            OSError: the journal cannot be read or written.
            ValueError: that line is not one of a journal.
        """
        acquired = super().acquire()
        try:
            _remove_torn_line(Path(self._lock_target_file))
        except BaseException:
            self.release()
            raise
        return acquired


def _remove_torn_line(journal: Path) -> None:
    with journal.open("rb+") as file:
        if not file.seek(0, os.SEEK_END):
            return
        file.seek(-1, os.SEEK_END)
        if file.read() == b"\n":
            return
        file.seek(0)
        whole, end, torn = file.read().rpartition(b"\n")
        # A machine that lost power may leave zeros where it had not written yet.
        begun = torn.rstrip(b"\0")
        if not begun.startswith(_ENTRY[: len(begun)]):
            raise ValueError("its last line is not an entry of Optuna")
        file.truncate(len(whole + end))


def _journal(url: str) -> BaseStorage:
    name = url.removeprefix(JOURNAL)
    if not Path(name).name:
        raise InputError(f"{hidden_url(url)!r} names no file.", hint="Write for instance journal:///shared/study.log.")
    path = user_path(name)
    try:
        # Absolute, because the lock is a symbolic link to the file.
        file = str(path.absolute())
        lock = _RepairingLock(file)
        backend = JournalFileBackend(file, lock)
        # Before anything is appended to another file; Optuna reports a bad line only if others follow it.
        lock.acquire()
        try:
            _check_lines(path)
        finally:
            lock.release()
        return optuna.storages.JournalStorage(backend)
    except OSError as error:
        raise _unusable(url, cause_of(error, url)) from error
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"The file {path} is not a journal of Optuna.", hint=_CHOOSE) from error


def _check_lines(journal: Path) -> None:
    """Check that every line of a file is an entry of a journal.

    Raises:
        InputError: a line after the first is not.
        ValueError: the first line is not.
    """
    with journal.open("rb") as file:
        number = next((number for number, line in enumerate(file, 1) if not _is_entry(line)), 0)
    if number == 1:
        raise ValueError("the first line is not an entry of Optuna")
    if number:
        hint = "Restore it from a copy, or choose another --storage."
        raise InputError(f"The journal {journal} is damaged: line {number} is not an entry of Optuna.", hint=hint)


def _is_entry(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return line.startswith(_ENTRY)


def _proxy(url: str) -> tuple[BaseStorage, Callable[[], object]]:
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as error:
        raise InputError(f"{hidden_url(url)!r} is not a storage URL.", hint=_EXAMPLES) from error
    host = parsed.host or "localhost"
    # SQLAlchemy removes the brackets of an IPv6 address.
    host = f"[{host}]" if ":" in host else host
    try:
        proxy = optuna.storages.GrpcStorageProxy(host=host, port=parsed.port or _DEFAULT_PORT)
        proxy.wait_server_ready(timeout=_CONNECT_SECONDS)
    except ImportError as error:
        raise InputError(
            f"The packages for the study storage {hidden_url(url)} are not installed.",
            hint="Install autotune's extra `grpc`.",
        ) from error
    except ConnectionError as error:
        hint = "Start one with optuna.storages.run_grpc_proxy_server."
        raise _unusable(url, f"no proxy answered within {_CONNECT_SECONDS} s", hint) from error
    return proxy, proxy.close


def _database(url: str, patience_seconds: float) -> tuple[BaseStorage, Callable[[], object]]:
    try:
        rdb = _open_database(url, _engine_options(url), patience_seconds)
    except (ArgumentError, NoSuchModuleError, ValueError) as error:
        raise InputError(f"{hidden_url(url)!r} is not a storage URL.", hint=_EXAMPLES) from error
    except ImportError as error:
        raise InputError(
            f"The database driver for the study storage {hidden_url(url)} is not installed ({cause_of(error, url)}).",
            hint="For PostgreSQL install autotune's extra `postgres` and write postgresql+psycopg://….",
        ) from error
    except (StorageInternalError, SQLAlchemyError) as error:
        raise _unusable(url, cause_of(error, url)) from error
    except RuntimeError as error:
        raise InputError(
            f"Another version of Optuna made the study storage {hidden_url(url)}.", hint=_CHOOSE
        ) from error
    return optuna.storages.get_storage(rdb), rdb.engine.dispose


def _open_database(url: str, options: dict[str, Any], patience_seconds: float) -> optuna.storages.RDBStorage:
    failing_since: float | None = None
    while True:
        try:
            return optuna.storages.RDBStorage(url, engine_kwargs=dict(options))
        except (StorageInternalError, SQLAlchemyError) as error:
            # Measured from the first failure: on a busy machine the first attempt alone may take longer than this.
            failing_since = time.monotonic() if failing_since is None else failing_since
            limit = _CREATION_SECONDS if _is_being_created(error) else patience_seconds if _may_restart(error) else 0.0
            if time.monotonic() - failing_since >= limit:
                raise
        time.sleep(random.uniform(0.1, 0.5))


def _may_restart(error: BaseException) -> bool:
    """Whether a database may be restarting: the failure is transient, and no rejection."""
    cause = cause_of(error)
    return is_transient(error) and ("FATAL" not in cause or "the database system is" in cause)


def _is_being_created(error: BaseException) -> bool:
    """Whether another process is creating the tables."""
    if any(isinstance(cause, IntegrityError) or "already exists" in str(cause) for cause in causes(error)):
        return True
    return "database is locked" in cause_of(error) and is_transient(error)


def _engine_options(url: str) -> dict[str, Any]:
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite":
        return {}
    options: dict[str, Any] = {"pool_pre_ping": True}
    psycopg = parsed.drivername in ("postgresql", "postgresql+psycopg", "postgresql+psycopg2")
    if psycopg:
        options["connect_args"] = {name: value for name, value in _LIBPQ_TIMEOUTS.items() if name not in parsed.query}
    return options
