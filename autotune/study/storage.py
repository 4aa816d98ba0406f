"""Opens an Optuna study, of one process or shared by several, and converts storage failures to errors with a hint."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import optuna
from optuna.exceptions import DuplicatedStudyError, ExperimentalWarning
from optuna.storages import BaseStorage

from autotune.confidential import hidden_url
from autotune.core.events import Listener, Noted
from autotune.errors import AutotuneError, InputError, StudyMismatchError
from autotune.study.backends import cause_of, connected, is_in_memory
from autotune.study.problem import StudyStorage
from autotune.study.retrying import RetryingStorage
from autotune.study.trial_documents import RATE
from autotune.units import format_duration

_FINGERPRINT = "autotune:fingerprint"
_HASH = re.compile(r"[0-9a-f]{16,}")
"""A part of a fingerprint that is too long to be shown."""

_RETURN_SECONDS = 30.0
"""Time that the restart of a database may take."""

_BIRTH_SECONDS = 2.0
"""Maximum time between the creation of a study and its fingerprint."""


@dataclass(frozen=True)
class OpenStudy:
    """A study that is open.

    Attributes:
        study: for Optuna's samplers, and for reading.
        storage: for writes that `optuna.Study` has no method for.
        study_id: the storage's number of the study.
    """

    study: optuna.Study
    storage: RetryingStorage
    study_id: int


def check_storage(url: str, name: str, *, resume: bool, fingerprint: Mapping[str, str] | None = None) -> None:
    """Check that a storage answers and, unless a study is resumed, that it has no study of this name.

    Args:
        fingerprint: of the study to be resumed; None if it is not known yet.

    Raises:
        InputError: the storage does not answer, or the study exists and is not to be resumed.
        StudyMismatchError: the study to be resumed was made for another search.
    """
    with _quiet():
        backend, close = connected(url, _RETURN_SECONDS if resume else 0.0)
        try:
            found = _fingerprint(backend, name)
            if found is not None and not resume:
                raise _exists(name, url)
            if found is not None and fingerprint is not None:
                _require_same(name, found, fingerprint)
        finally:
            close()


def begin(storage: StudyStorage, listener: Listener) -> None:
    """Create a study, or check that the one that exists may be resumed, before several processes join it.

    Raises:
        InputError: the storage cannot be used, or by one process alone; or the study exists and is not to be resumed.
        StudyMismatchError: the study to be resumed was made for another search.
        AutotuneError: the storage does not answer.
    """
    if is_in_memory(storage.url):
        raise InputError(
            f"The study storage {hidden_url(storage.url)} lies in the memory of one process, and workers share theirs.",
            hint="Leave out --storage, or name a file.",
        )
    with opened(storage, listener):
        pass


@contextmanager
def opened(storage: StudyStorage, listener: Listener) -> Iterator[OpenStudy]:
    """Yield the study that ``storage`` names, created where it does not exist; no Optuna log or warning is shown.

    Raises:
        InputError: the storage cannot be used, or the study exists and is not to be resumed.
        StudyMismatchError: the study to be resumed was made for another search.
        AutotuneError: the storage failed later on, such as on a full disk, or did not answer for too long.
    """
    url, patience = hidden_url(storage.url), storage.sharing.patience_seconds

    def failed(error: BaseException) -> AutotuneError:
        if isinstance(error, KeyError):
            hint = "Another process has deleted it. Start another one: leave out --resume, or give --study."
            return AutotuneError(f"The study {storage.name!r} is no longer in {url}.", hint=hint)
        hint = "Repair or restart the storage, then continue with --resume."
        return AutotuneError(f"The study storage {url} cannot be used: {cause_of(error, storage.url)}.", hint=hint)

    def waits(error: BaseException) -> None:
        known = f"The study storage {url} does not answer ({cause_of(error, storage.url)})"
        listener(Noted(f"{known}: it is asked again for {format_duration(patience)}."))

    with _quiet():
        # Retry the first connection only to resume: a new study's URL may be mistyped.
        backend, close = connected(storage.url, _RETURN_SECONDS if storage.resume else 0.0)
        longest_delay_seconds = storage.sharing.interval_seconds / 2
        # A decorator defines the abstract methods.
        patient = RetryingStorage(backend, patience, longest_delay_seconds, failed, waits)  # type: ignore[abstract]
        try:
            study = _study(patient, storage, listener)
            patient.has_study = True
            yield OpenStudy(study, patient, patient.get_study_id_from_name(storage.name))
        finally:
            patient.closing.set()
            close()


def _study(patient: RetryingStorage, storage: StudyStorage, listener: Listener) -> optuna.Study:
    # The study's own sampler is not used; this one does nothing at the start of a trial.
    sampler = optuna.samplers.RandomSampler()
    try:
        study = optuna.create_study(storage=patient, study_name=storage.name, direction="maximize", sampler=sampler)
        fresh = True
    except DuplicatedStudyError:
        study = optuna.load_study(storage=patient, study_name=storage.name, sampler=sampler)
        # A kill between the creation of a study and its fingerprint leaves an empty one, which counts as new.
        fresh = _is_left_empty(study)
    if fresh:
        study.set_metric_names([RATE])
        study.set_user_attr(_FINGERPRINT, dict(storage.fingerprint))
        if storage.resume:
            listener(
                Noted(f"There is no study {storage.name!r} to resume in {hidden_url(storage.url)}: a new one begins.")
            )
        return study
    if not storage.resume:
        raise _exists(storage.name, storage.url)
    _require_same(storage.name, study.user_attrs.get(_FINGERPRINT, {}), storage.fingerprint)
    return study


def _exists(name: str, url: str) -> InputError:
    return InputError(
        f"The search of an earlier run, the study {name!r}, already exists in {hidden_url(url)}.",
        hint="Add --resume to continue or to join it. For another search, choose another --output or, with --storage,"
        " another --study.",
    )


def _fingerprint(backend: BaseStorage, name: str) -> Mapping[str, str] | None:
    """Return the fingerprint of a study; None if there is no study, or it has not begun."""
    try:
        found: Mapping[str, str] = backend.get_study_user_attrs(backend.get_study_id_from_name(name))[_FINGERPRINT]
    except KeyError:
        return None
    return found


def _is_left_empty(study: optuna.Study) -> bool:
    """Whether a study still has neither a fingerprint nor trials after :data:`_BIRTH_SECONDS`."""
    for _ in range(round(_BIRTH_SECONDS / 0.1)):
        if _FINGERPRINT in study.user_attrs or study.get_trials(deepcopy=False):
            return False
        time.sleep(0.1)
    return True


def _require_same(name: str, found: Mapping[str, str], expected: Mapping[str, str]) -> None:
    # In the order of the fingerprint: another dataset comes before the choices that differ with it.
    differing = [part for part in {**expected, **found} if found.get(part) != expected.get(part)]
    if differing:
        differences = "; ".join(
            _difference(part, expected.get(part, "not given"), found.get(part, "not given")) for part in differing
        )
        raise StudyMismatchError(
            f"The study {name!r} was made for another search: {differences}.",
            hint="To resume or join it, restore what differs: options (--memory-budget included), files of the model,"
            " the data, the rewards or the base, versions, the machine. Otherwise choose another --output or --study.",
        )


def _difference(part: str, here: str, there: str) -> str:
    hashed = any(map(_HASH.fullmatch, (here, there)))
    return f"different {part}" if hashed else f"{part}: {here} here, {there} there"


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
