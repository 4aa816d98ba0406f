"""Makes libraries compute once per process what is the same in all its traces."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from unittest import mock

import datasets.arrow_dataset
import datasets.fingerprint

from autotune.step.models.processors import vocabularies_read_once

# accelerate parses those of the same packages a dozen times per training (accelerate/utils/imports.py).
_metadata = cache(importlib.metadata.metadata)


@contextmanager
def computed_once() -> Iterator[None]:
    """Keep vocabularies and packages' metadata in this context, and name rows by chance instead of hashing them.

    The name of rows is that of their file in datasets' cache, which traces do not have.
    """
    with ExitStack() as stack:
        stack.enter_context(vocabularies_read_once())
        stack.enter_context(mock.patch.object(importlib.metadata, "metadata", _metadata))
        for module in (datasets.fingerprint, datasets.arrow_dataset):
            if hasattr(module, "update_fingerprint"):
                stack.enter_context(mock.patch.object(module, "update_fingerprint", _named))
        yield


def _named(*_: object) -> str:
    return str(datasets.fingerprint.generate_random_fingerprint())
