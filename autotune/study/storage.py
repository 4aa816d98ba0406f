"""Opens the Optuna study and converts failures of its storage into one message."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import optuna
from optuna.exceptions import DuplicatedStudyError, ExperimentalWarning, StorageInternalError
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

from autotune.core.events import Listener, Noted
from autotune.errors import AutotuneError, InputError, StudyMismatchError
from autotune.study.problem import StudyStorage
from autotune.study.trial_log import RATE

_FINGERPRINT = "autotune:fingerprint"


@contextmanager
def opened(storage: StudyStorage, listener: Listener) -> Iterator[optuna.Study]:
    """Yield the study that ``storage`` names, created where it does not exist; no Optuna log or warning is shown.

    Raises:
        InputError: the storage cannot be used, or the study exists and is not to be resumed.
        StudyMismatchError: the study to be resumed was made for something else.
        AutotuneError: the storage failed later on, such as on a full disk.
    """
    with _quiet():
        rdb = _connect(storage.url)
        try:
            with _failures(storage.url, AutotuneError, "Put that right, then go on with --resume."):
                yield _study(rdb, storage, listener)
        finally:
            rdb.engine.dispose()


def _connect(url: str) -> optuna.storages.RDBStorage:
    hint = "Choose another --storage or --output."
    try:
        with _failures(url, InputError, hint):
            return optuna.storages.RDBStorage(url)
    except (ArgumentError, NoSuchModuleError, ValueError) as error:
        example = "Write for instance sqlite:///study.db."
        raise InputError(f"{_shown(url)!r} is not a storage URL.", hint=example) from error
    except ImportError as error:
        raise InputError(
            f"The database driver for the study storage {_shown(url)} is not installed ({error.__cause__ or error}).",
            hint="For PostgreSQL install autotune's extra `postgres` and write postgresql+psycopg://….",
        ) from error
    except RuntimeError as error:
        raise InputError(f"Another version of Optuna made the study storage {_shown(url)}.", hint=hint) from error


def _study(rdb: optuna.storages.RDBStorage, storage: StudyStorage, listener: Listener) -> optuna.Study:
    try:
        study = optuna.create_study(storage=rdb, study_name=storage.name, direction="maximize")
        fresh = True
    except DuplicatedStudyError:
        study = optuna.load_study(storage=rdb, study_name=storage.name)
        # A kill between the creation of a study and its fingerprint leaves an empty one, which counts as new.
        fresh = _FINGERPRINT not in study.user_attrs and not study.get_trials(deepcopy=False)
    if fresh:
        study.set_metric_names([RATE])
        study.set_user_attr(_FINGERPRINT, dict(storage.fingerprint))
        if storage.resume:
            listener(Noted(f"There is no study {storage.name!r} to resume in {_shown(storage.url)}: a new one begins."))
        return study
    if not storage.resume:
        raise InputError(
            f"The study {storage.name!r} already exists in {_shown(storage.url)}.",
            hint="Add --resume to continue it, or choose another --output or --study.",
        )
    _require_same(storage.name, study.user_attrs.get(_FINGERPRINT, {}), storage.fingerprint)
    return study


def _require_same(name: str, found: Mapping[str, str], expected: Mapping[str, str]) -> None:
    differing = sorted(part for part in found.keys() | expected.keys() if found.get(part) != expected.get(part))
    if differing:
        raise StudyMismatchError(
            f"The study {name!r} was made for something else: {', '.join(differing)} differ.",
            hint="Resume it with what it was made for, or choose another --output or --study.",
        )


@contextmanager
def _failures(url: str, kind: type[AutotuneError], hint: str) -> Iterator[None]:
    try:
        yield
    except (ArgumentError, NoSuchModuleError):
        raise
    except (StorageInternalError, SQLAlchemyError) as error:
        raise kind(f"The study storage {_shown(url)} cannot be used: {_cause(error)}.", hint=hint) from error


def _cause(error: BaseException) -> str:
    """Return the database's own message: the innermost of Optuna's, SQLAlchemy's and the driver's exceptions."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip().splitlines()[0].rstrip(".")


def _shown(url: str) -> str:
    try:
        return make_url(url).render_as_string(hide_password=True)
    except ArgumentError:
        return url


@contextmanager
def _quiet() -> Iterator[None]:
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(verbosity)
