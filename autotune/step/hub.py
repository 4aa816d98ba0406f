"""Separates a hub that cannot be reached from a name that it does not have."""

from __future__ import annotations

from huggingface_hub.errors import LocalEntryNotFoundError

from autotune.errors import InputError, UnreadError, causes

# What is neither here nor can be looked up; that the hub is offline is a ConnectionError.
_UNREACHED = (ConnectionError, LocalEntryNotFoundError)


def not_loaded(error: BaseException, message: str, hint: str) -> InputError:
    """Return the error for a model or a dataset that could not be loaded.

    It is an :class:`UnreadError` where the hub was not reached: the job itself may well run.
    """
    unreached = any(isinstance(cause, _UNREACHED) for cause in causes(error))
    return (UnreadError if unreached else InputError)(message, hint=hint)
