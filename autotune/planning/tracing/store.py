"""Returns traces from memory or the cache on disk, and runs the missing ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from autotune.core.codec import DecodeError, decode, encode
from autotune.core.gpu import Gpu
from autotune.core.traced import TraceReply, TraceRequest
from autotune.core.workload import ModelSource
from autotune.planning.tracing.cache import Cache, checked_key, fingerprint
from autotune.planning.tracing.operators import OperatorTimes
from autotune.probing.tracing import Traced, Untraceable

Tracer = Callable[[Sequence[TraceRequest]], Iterable[Traced]]
"""Runs traces; the results are in the order of the requests and may arrive one by one."""


class Traces:
    """Traces by request.

    Args:
        gpus: those that traces may be asked for. A trace for one of them stands for all others on which PyTorch takes
            the same kernels in it, so it is run once for them.
        times: replaces the predicted times of operators by measured ones; None: they stay.
    """

    def __init__(
        self,
        tracer: Tracer,
        cache: Cache,
        model_fingerprint: str,
        versions: Mapping[str, str],
        gpus: Sequence[Gpu] = (),
        times: OperatorTimes | None = None,
    ) -> None:
        self.times = times
        self._tracer = tracer
        self._gpus = tuple(gpus)
        self.cache = cache
        self._identity = (model_fingerprint, dict(versions))
        self._known: dict[str, Traced] = {}
        # By the key of a request that another's trace stands for, that one's key.
        self._same: dict[str, str] = {}
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
        return self._found_at(self._key(self._asked(request))) in self._new

    def get(self, requests: Sequence[TraceRequest]) -> list[Traced]:
        """Return the traces of requests, in their order; those that are missing are run."""
        asked = [self._asked(request) for request in requests]
        keys = [self._key(request) for request in asked]
        missing = self._missing(zip(keys, asked, strict=True))
        replies = self._tracer([*missing.values()]) if missing else ()
        for (key, request), traced in zip(missing.items(), replies, strict=True):
            self._known[key] = traced
            self._same.pop(key, None)
            if isinstance(traced, TraceReply):
                self.cache.put(key, {"kind": "reply", "body": encode(traced)})
                self._share(key, request, traced)
            elif traced.lasting:
                self.cache.put(key, {"kind": "untraceable", "body": encode(traced)})
            self._new.add(key)
        found = [
            _of(self._known[self._found_at(key)], request) or self._known[key]
            for key, request in zip(keys, asked, strict=True)
        ]
        return self.times.timed(found) if self.times is not None else found

    def _asked(self, request: TraceRequest) -> TraceRequest:
        return replace(request, operators=self.times is not None)

    def _key(self, request: TraceRequest) -> str:
        # Model and dataset are identified by their fingerprints, not by their paths; a reply may have more replays and
        # GPUs than are asked for, and what it has for all GPUs alike depends on their kernels alone.
        capability = request.gpu.compute_capability if request.gpu is not None else None
        chosen = request.chosen and replace(request.chosen, directory="")
        asked = replace(request, model=ModelSource(""), allocators=(), gpu=None, others=(), chosen=chosen)
        return fingerprint("trace", asked, capability, self._identity)

    def _found_at(self, key: str) -> str:
        """Return the key of the trace that stands for a request's, which is its own if there is no other."""
        return self._same.get(key, key)

    def _share(self, key: str, request: TraceRequest, reply: TraceReply) -> None:
        """Remember the requests for other GPUs that a reply stands for."""
        for figures in reply.gpus:
            other = self._key(replace(request, gpu=figures.gpu))
            if other != key and other not in self._known:
                self._same[other] = key
                self.cache.put(other, {"kind": "same", "body": key})

    def _others(self, request: TraceRequest) -> tuple[Gpu, ...]:
        """Return the GPUs that a request's trace may stand for too; what follows varied lengths is of one GPU."""
        if request.target != "cuda" or request.gpu is None or request.varied:
            return ()
        # In machines with the same network, which the user names once for all GPUs.
        network = request.gpu.speeds.network if request.gpu.speeds is not None else None
        alike = dict.fromkeys(gpu.networked(network) for gpu in self._gpus)
        return tuple(gpu for gpu in alike if gpu != request.gpu)

    def _missing(self, asked: Iterable[tuple[str, TraceRequest]]) -> dict[str, TraceRequest]:
        """Return the requests to run, by key: those that are not known, and those that lack a replay."""
        missing: dict[str, TraceRequest] = {}
        for key, request in asked:
            known = self._known[self._found_at(key)] if self._find(key) else None
            if isinstance(known, Untraceable):
                continue
            own = known and _of(known, request)
            replays = tuple(found.allocator for found in known.replays) if known is not None else ()
            if own is None or not set(request.replayed) <= set(replays):
                # Replayed and timed again for what is known too: of two search spaces, neither drops what the other
                # needs.
                uses = missing[key].allocators if key in missing else replays
                gpus = [figures.gpu for figures in known.gpus if not figures.are_of(request.gpu)] if known else []
                others = self._others(request) or tuple(gpus)
                missing[key] = replace(request, allocators=(*request.allocators, *uses), others=others)
        return missing

    def _find(self, key: str) -> bool:
        place, passed = self._found_at(key), set[str]()
        while place not in self._known:
            passed.add(place)
            named = self._read(place)
            # What a document names may have been removed from the cache; or processes named each other's.
            if named is None or (named in passed and named not in self._known):
                return False
            place = named
        if place != key:
            self._same[key] = place
        return True

    def _read(self, key: str) -> str | None:
        """Read a document of the cache; return the key of the trace that it has or names, None where it has none."""
        document = self.cache.get(key)
        if document is None:
            return None
        try:
            if document["kind"] == "same":
                return checked_key(document["body"])
            kind: type[Traced] = Untraceable if document["kind"] == "untraceable" else TraceReply
            self._known[key] = decode(kind, document["body"])
        except (DecodeError, KeyError, TypeError):
            self.cache.drop(key)
            return None
        return key


def _of(traced: Traced, request: TraceRequest) -> Traced | None:
    """Return what a trace says of the request's GPU, or None where it says nothing of it."""
    if isinstance(traced, Untraceable):
        return traced
    found = next((figures for figures in traced.gpus if figures.are_of(request.gpu)), None)
    if found is None:
        return None
    own = next((each for each in found.replays if each.allocator == request.allocator), None)
    return replace(
        traced,
        allocated_bytes=own.allocated_bytes if own is not None else traced.allocated_bytes,
        reserved_bytes=own.reserved_bytes if own is not None else traced.reserved_bytes,
        step=found.step,
        sections=tuple(replace(section, time=time) for section, time in zip(traced.sections, found.times, strict=True)),
        replays=found.replays,
    )
