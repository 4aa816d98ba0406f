"""Errors that are shown to the user as one message; every other exception is a bug of autotune."""

from __future__ import annotations

import copyreg
import difflib
from collections.abc import Iterable
from typing import Any

from autotune.confidential import hidden


class AutotuneError(Exception):
    """A failure with a message for the user: the problem and its remedy.

    Attributes:
        message: one sentence that names the thing that is wrong.
        hint: advice for the user, or an empty string.
        exit_code: exit code of the command line.
    """

    exit_code = 2

    def __init__(self, message: str, *, hint: str = "") -> None:
        # Messages quote input, and errors of libraries about it.
        self.message = hidden(message)
        self.hint = hidden(hint)
        # A quoted library's message may lack the stop at its end.
        stop = "." if self.hint and self.message[-1:] not in (*".!?:;,", "") else ""
        super().__init__(f"{self.message}{stop} {self.hint}".strip())

    def __reduce__(self) -> tuple[object, ...]:
        # By default, a copy is made by calling the class with the text alone, and some take more.
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]  # not in its stub


class InputError(AutotuneError):
    """An input of the user is invalid."""


class UnreadError(InputError):
    """A configuration may run, but autotune does not support a part of it."""


class UnwrittenError(InputError):
    """The files of a finished result could not be written.

    Attributes:
        document: the result, a :class:`autotune.core.documents.result.Result` or an :class:`autotune.Plan`.
    """

    def __init__(self, cause: InputError, document: Any) -> None:
        super().__init__(cause.message, hint=cause.hint)
        self.document = document


class InterruptedSearchError(KeyboardInterrupt):
    """Ctrl-C ended a search, whose result so far is written; not an :class:`AutotuneError`, so that a script ends.

    Attributes:
        document: the result so far, a :class:`autotune.core.documents.result.Result`.
    """

    def __init__(self, message: str, document: Any) -> None:
        super().__init__(message)
        self.document = document


class StudyMismatchError(AutotuneError):
    """The study found on disk belongs to another workload, hardware, software or search space."""


class JobLostError(AutotuneError):
    """A job's process was killed, timed out, or lacked memory or a file. A retry may succeed."""


class ProbeServerError(AutotuneError):
    """The process that starts probes could not be started, or died and could not be replaced."""


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return a question with the most similar of the known words, and a space; an empty text if none is similar."""
    near = difflib.get_close_matches(word.lower(), known, n=1)
    return f"Did you mean {near[0]!r}? " if near else ""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its class if it has none."""
    # The text of a KeyError is the key in quotes.
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return (text.strip().splitlines() or [type(error).__name__])[0]


def one_line(error: BaseException) -> str:
    """Return an error's message without its line breaks."""
    return " ".join(str(error).split())


def causes(error: BaseException | None) -> list[BaseException]:
    """Return an error and its chain of causes (``__cause__``, else ``__context__``), each once."""
    links: list[BaseException] = []
    while error is not None and error not in links:
        links.append(error)
        error = error.__cause__ or error.__context__
    return links
