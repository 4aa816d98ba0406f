"""Distinguishes an unreachable or refusing Hugging Face hub from an unknown name of a model or dataset."""

from __future__ import annotations

from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError

from autotune.errors import InputError, UnreadError, causes

# LocalEntryNotFoundError: the file is not cached and the hub did not answer. An offline hub raises a ConnectionError.
_UNREACHED_ERRORS = (ConnectionError, LocalEntryNotFoundError, GatedRepoError)
_TOO_MANY_REQUESTS, _SERVER_ERROR = 429, 500
# ``datasets`` raises its error about a gated dataset without the cause (``dataset_module_factory``).
_GATED = "is a gated dataset"


def loading_error(error: BaseException, message: str, hint: str) -> InputError:
    """Return the error for a model or a dataset that could not be loaded.

    It is an :class:`UnreadError` if the hub was not reached or requires a token: the training itself may still run.
    """
    unreached = _GATED in str(error) or any(map(_is_unreached, causes(error)))
    return (UnreadError if unreached else InputError)(message, hint=hint)


def _is_unreached(error: BaseException) -> bool:
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else 0
    return isinstance(error, _UNREACHED_ERRORS) or status == _TOO_MANY_REQUESTS or status >= _SERVER_ERROR
