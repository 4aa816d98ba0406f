"""An error keeps its message and its data, also when it is sent to another process."""

from __future__ import annotations

import copy
import importlib
import pickle
from collections.abc import Iterator

import pytest

from autotune.core.documents.verdict import Outcome, Verdict, WillNotFit
from autotune.errors import AutotuneError, InputError, UnwrittenError
from tests.test_architecture import PARENT_MODULES


def every_kind(kind: type[AutotuneError] = AutotuneError) -> Iterator[type[AutotuneError]]:
    """Yield a class and all that are derived from it, in every module that a user's own process may import."""
    yield kind
    for derived in kind.__subclasses__():
        yield from every_kind(derived)


def test_an_error_of_any_kind_can_be_sent_to_another_process() -> None:
    for name in PARENT_MODULES:
        importlib.import_module(name)
    for kind in every_kind():
        error = kind.__new__(kind, "It is broken. Mend it.")
        vars(error).update(message="It is broken.", hint="Mend it.", found={"by": "a test"})
        sent = pickle.loads(pickle.dumps(error))
        assert (type(sent), str(sent), vars(sent)) == (kind, str(error), vars(error))


@pytest.mark.parametrize(
    "error",
    [
        InputError("It is broken.", hint="Mend it."),
        WillNotFit("It needs too much.", Verdict(Outcome.DOES_NOT_FIT, "does not fit"), hint="Pack rows."),
        UnwrittenError(InputError("The disk is full.", hint="Free some."), {"a": "result"}),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_copy_of_an_error_has_all_that_the_error_has(error: AutotuneError) -> None:
    for copied in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert (str(copied), vars(copied)) == (str(error), vars(error))


def test_a_hint_begins_a_sentence_after_a_message_that_a_library_left_without_a_stop() -> None:
    quoted = InputError("It cannot be loaded: there is no file", hint="Save it.")
    assert str(quoted) == "It cannot be loaded: there is no file. Save it."
    assert str(InputError("Is it there?", hint="Look.")) == "Is it there? Look."
    assert str(InputError("No module named 'rewards'", hint="Look.")) == "No module named 'rewards'. Look."
    assert str(InputError("It is broken")) == "It is broken"
