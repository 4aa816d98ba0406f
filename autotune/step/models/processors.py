"""Loads a model's tokenizer or processor once per process, for all traces of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from unittest import mock

from transformers import PreTrainedTokenizerFast

from autotune.core.workload import ModelSource
from autotune.step.models.loading import load_processor, tokenizer_of


@dataclass(frozen=True)
class _Loaded:
    """A processor as it was loaded.

    Attributes:
        backend: the Rust tokenizer in it, or None; copying that takes as long as loading it.
        state: of the backend: a trainer may add words, or truncate.
    """

    processor: Any
    backend: Any
    state: tuple[object, ...]


_loaded: dict[tuple[ModelSource, type[Any]], _Loaded] = {}


def processor_for(source: ModelSource, auto_class: type[Any]) -> Any:
    """Return a processor that is as :func:`load_processor` returns it, and that may be changed.

    Raises:
        InputError: there is none, or it cannot be read.
    """
    loaded = _loaded.get((source, auto_class))
    if loaded is None or _state(loaded.backend) != loaded.state:
        processor = load_processor(source, auto_class)
        backend = getattr(tokenizer_of(processor), "_tokenizer", None)
        loaded = _loaded[source, auto_class] = _Loaded(processor, backend, _state(backend))
    return deepcopy(loaded.processor, {id(loaded.backend): loaded.backend})


@contextmanager
def vocabularies_read_once() -> Iterator[None]:
    """Return the same dictionary whenever a tokenizer is asked for its words: trainers look special tokens up in it."""

    def get_vocab(tokenizer: Any) -> dict[str, int]:
        return _vocabulary(tokenizer._tokenizer, tokenizer._tokenizer.get_vocab_size())

    with mock.patch.object(PreTrainedTokenizerFast, "get_vocab", get_vocab):
        yield


@lru_cache(4)
def _vocabulary(backend: Any, _size: int) -> dict[str, int]:
    """Return the words of a Rust tokenizer, which may have been given more of them since it was last asked."""
    words: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    return words


def _state(backend: Any) -> tuple[object, ...]:
    return () if backend is None else (backend.get_vocab_size(), backend.truncation, backend.padding)
