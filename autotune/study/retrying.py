"""Optuna storage that retries transient failures of another storage: restarts, locks, lost connections."""

from __future__ import annotations

import abc
import errno
import random
import sqlite3
import threading
import time
from collections.abc import Callable
from functools import partialmethod
from typing import Any

from optuna.exceptions import DuplicatedStudyError, StorageInternalError, UpdateFinishedTrialError
from optuna.storages import BaseStorage
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, PendingRollbackError, SQLAlchemyError

from autotune.errors import causes

_FIRST_DELAY_SECONDS = 0.1

_EXPECTED_ERRORS = (DuplicatedStudyError, UpdateFinishedTrialError)
"""Exceptions of a working storage: the study already exists, or the trial has finished."""

_TRANSIENT_ERRNOS = frozenset({
    errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.EIO, errno.ESTALE, errno.ETIMEDOUT,
    errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH,
})  # fmt: skip
"""Errors of a network file system during a restart of its server."""


def storage_failures() -> tuple[type[Exception], ...]:
    """Return the exception types of failing storages of Optuna: databases, files, gRPC."""
    # JournalStorage raises RuntimeError for a lost lock, and ValueError for a broken file.
    known: tuple[type[Exception], ...] = (StorageInternalError, SQLAlchemyError, OSError, RuntimeError, ValueError)
    try:
        import grpc
    except ImportError:
        return known
    return (*known, grpc.RpcError)


def is_transient(error: BaseException) -> bool:
    """Whether the same call may succeed later without any action of the user."""
    if type(error).__module__.startswith("grpc"):
        return True
    if isinstance(error, RuntimeError) and "did not possess lock" in str(error):
        return True
    for cause in causes(error):
        if isinstance(cause, DBAPIError):
            return _is_transient_in_database(cause)
        if isinstance(cause, OSError):
            return cause.errno in _TRANSIENT_ERRNOS
        if isinstance(cause, PendingRollbackError):
            # The connection was lost in a transaction, which Optuna rolls back while raising.
            return True
    return False


def _is_transient_in_database(error: DBAPIError) -> bool:
    if isinstance(error.orig, sqlite3.Error):
        code = getattr(error.orig, "sqlite_errorcode", 0) & 0xFF
        return code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
    return error.connection_invalidated or isinstance(error, (OperationalError, InterfaceError))


def _forward_methods(cls: type[RetryingStorage]) -> type[RetryingStorage]:
    """Class decorator that defines all abstract methods of Optuna's storage as calls of the backend with retries."""
    for name in BaseStorage.__abstractmethods__:
        setattr(cls, name, partialmethod(cls._call, name))
    return abc.update_abstractmethods(cls)


@_forward_methods
class RetryingStorage(BaseStorage):
    """Forwards every call to another storage, one at a time, and retries failing calls for a limited time.

    A failed call may have taken effect if only its reply was lost. Repeating it is harmless for attributes; the caller
    has to handle trials that are created or finished twice.

    Attributes:
        has_study: whether the study was found; then a KeyError means that it has been deleted, which is a failure.
        closing: event that stops retries.
    """

    def __init__(
        self,
        backend: BaseStorage,
        patience_seconds: float,
        longest_delay_seconds: float,
        convert_error: Callable[[BaseException], Exception],
        on_outage: Callable[[BaseException], object],
    ) -> None:
        """Wrap a storage.

        Args:
            patience_seconds: time after the first failure of a call during which it is retried, at least once.
            longest_delay_seconds: maximum time between two attempts. After an outage, every worker has to renew its
                lease before another one considers it dead.
            convert_error: converts a permanent failure to the exception to raise.
            on_outage: called once per outage, in the thread that created this object.
        """
        self._backend = backend
        self._patience_seconds = patience_seconds
        self._longest_delay_seconds = longest_delay_seconds
        self._convert_error = convert_error
        self._on_outage = on_outage
        self._lock = threading.RLock()
        self._owner = threading.get_ident()
        self._failures = storage_failures()
        self.has_study = False
        self.closing = threading.Event()

    def _call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        delay, failing_since = _FIRST_DELAY_SECONDS, None
        while True:
            try:
                with self._lock:
                    return getattr(self._backend, name)(*args, **kwargs)
            except KeyError as error:
                if not self.has_study:
                    raise
                raise self._convert_error(error) from error
            except _EXPECTED_ERRORS:
                raise
            except self._failures as error:
                now = time.monotonic()
                failing_since = now if failing_since is None else failing_since
                over = now - failing_since > self._patience_seconds or self.closing.is_set()
                if over or not is_transient(error):
                    raise self._convert_error(error) from error
                if delay == _FIRST_DELAY_SECONDS and threading.get_ident() == self._owner:
                    self._on_outage(error)
            self.closing.wait(delay * random.uniform(0.5, 1.0))
            delay = min(2 * delay, self._longest_delay_seconds)
