"""Returns traces from memory or the cache on disk, and runs the missing ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from autotune.core.codec import DecodeError, decode, encode
from autotune.core.protocol import TraceReply, TraceRequest
from autotune.core.workload import ModelSource
from autotune.planning.tracing.cache import Cache, fingerprint
from autotune.probing.tracing import Traced, Untraceable

Tracer = Callable[[Sequence[TraceRequest]], Iterable[Traced]]
"""Runs traces; the results are in the order of the requests and may arrive one by one."""


class Traces:
    """Traces by request."""

    def __init__(self, tracer: Tracer, cache: Cache, model_fingerprint: str, versions: Mapping[str, str]) -> None:
        self._tracer = tracer
        self._cache = cache
        self._identity = (model_fingerprint, dict(versions))
        self._known: dict[str, Traced] = {}
        self._new: set[str] = set()

    @property
    def count(self) -> int:
        """Number of traces."""
        return len(self._known)

    @property
    def new_count(self) -> int:
        """How many of them were run rather than found."""
        return len(self._new)

    def is_new(self, request: TraceRequest) -> bool:
        """Return whether the trace of a request was run rather than found."""
        return self._key(request) in self._new

    def get(self, requests: Sequence[TraceRequest]) -> list[Traced]:
        """Return the traces of requests, in their order; those that are missing are run."""
        keys = [self._key(request) for request in requests]
        missing = self._missing(zip(keys, requests, strict=True))
        for key, traced in zip(missing, self._run(list(missing.values())), strict=True):
            self._known[key] = traced
            if not isinstance(traced, Untraceable) or traced.lasting:
                self._keep(key, traced)
            self._new.add(key)
        return [self._known[key] for key in keys]

    def _run(self, requests: Sequence[TraceRequest]) -> Iterator[Traced]:
        if requests:
            yield from self._tracer(requests)

    def _key(self, request: TraceRequest) -> str:
        # The model is identified by its fingerprint, not by its path; a reply may have more replays than are asked for.
        return fingerprint("trace", replace(request, model=ModelSource(""), allocators=()), self._identity)

    def _missing(self, asked: Iterable[tuple[str, TraceRequest]]) -> dict[str, TraceRequest]:
        """Return the requests to run, by key: those that are not known, and those that lack a replay."""
        missing: dict[str, TraceRequest] = {}
        for key, request in asked:
            known = self._known[key] if key in self._known or self._find(key) else None
            if isinstance(known, Untraceable):
                continue
            replays = tuple(found.allocator for found in known.replays) if known is not None else ()
            if known is None or not set(request.replayed) <= set(replays):
                # Replayed again for what is known too: of two search spaces, neither drops what the other needs.
                others = missing[key].allocators if key in missing else replays
                missing[key] = replace(request, allocators=(*request.allocators, *others))
        return missing

    def _keep(self, key: str, traced: Traced) -> None:
        kind = "untraceable" if isinstance(traced, Untraceable) else "reply"
        self._cache.put(key, {"kind": kind, "body": encode(traced)})

    def _find(self, key: str) -> bool:
        document = self._cache.get(key)
        if document is None:
            return False
        try:
            kind: type[Traced] = Untraceable if document["kind"] == "untraceable" else TraceReply
            self._known[key] = decode(kind, document["body"])
        except (DecodeError, KeyError, TypeError):
            self._cache.drop(key)
            return False
        return True
