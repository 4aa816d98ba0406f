"""Returns traces from memory or the cache on disk, and runs the missing ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from autotune.core.gpu import Gpu
from autotune.core.traced import TraceReply, TraceRequest
from autotune.core.workload import ModelSource
from autotune.planning.tracing.cache import Cache, fingerprint
from autotune.planning.tracing.operators import OperatorTimes
from autotune.probing.tracing import Traced, Untraceable

Tracer = Callable[[Sequence[TraceRequest]], Iterable[Traced]]
"""Runs traces; the results are in the order of the requests and may arrive one by one."""

_Capability = tuple[int, int] | None
_At = tuple[str, _Capability]
"""The fingerprint of a request without its GPU, and the GPU's compute capability."""


@dataclass(frozen=True)
class _Document:
    """The known results of a request: its traces, and failures by compute capability."""

    replies: tuple[TraceReply, ...] = ()
    failures: tuple[tuple[_Capability, Untraceable], ...] = ()

    def find(self, capability: _Capability) -> Traced | None:
        """Return the known result for a compute capability."""
        traces = (reply for reply in self.replies if capability in _capabilities(reply))
        return dict(self.failures).get(capability) or next(traces, None)

    def but(self, capability: _Capability, traced: Traced) -> _Document:
        """Return the document with a new trace, which replaces traces that are valid for no other GPUs."""
        failures = tuple(each for each in self.failures if each[0] != capability)
        if isinstance(traced, Untraceable):
            return replace(self, failures=((capability, traced), *failures))
        others = (reply for reply in self.replies if not _capabilities(reply) <= _capabilities(traced))
        return _Document((traced, *others), failures)


class Traces:
    """Traces by request.

    Args:
        gpus: GPUs for which traces may be requested. A trace for one of them is also valid for the others on which
            PyTorch selects the same kernels, so it is run once.
        times: replaces the predicted times of operators by measured ones; None: predictions are kept.

    Attributes:
        new_count: number of traces that were run, not found in the cache.
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
        self._known: dict[str, _Document] = {}
        self._used: dict[int, Traced] = {}
        self.new_count = 0

    @property
    def count(self) -> int:
        """Number of traces."""
        return len(self._used)

    def get(self, requests: Sequence[TraceRequest]) -> list[Traced]:
        """Return the traces of requests, in their order; missing ones are run, the deepest first.

        Traces that were run before an error or an interrupt are kept.
        """
        asked = [self._asked(request) for request in requests]
        places = [self._at(request) for request in asked]
        missing = self._missing(zip(places, asked, strict=True))
        deepest_first = sorted(missing, key=lambda at: missing[at].layers or 0, reverse=True)
        new: dict[_At, Traced] = {}
        if missing:
            # The iterator has no other reference, so that it ends with this loop, even on an error.
            for at, traced in zip(deepest_first, self._tracer([missing[at] for at in deepest_first]), strict=True):
                new[at] = traced
                self._keep(at, traced)
        traces = [known for at in places if (known := new.get(at) or self._find(at))]
        self._used.update((id(known), known) for known in traces)
        found = [_of(traced, request) or traced for traced, request in zip(traces, asked, strict=True)]
        return self.times.timed(found) if self.times is not None else found

    def _asked(self, request: TraceRequest) -> TraceRequest:
        return replace(request, operators=self.times is not None)

    def _at(self, request: TraceRequest) -> _At:
        # Model and dataset are identified by their fingerprints, not by their paths. A reply may be for more GPUs than
        # one; apart from their figures, it depends on their kernels alone.
        capability = request.gpu.compute_capability if request.gpu is not None else None
        chosen = request.chosen and replace(request.chosen, directory="")
        asked = replace(request, model=ModelSource(""), gpu=None, others=(), chosen=chosen)
        return fingerprint("trace", asked, self._identity), capability

    def _others(self, request: TraceRequest) -> tuple[Gpu, ...]:
        """Return further GPUs for which a request's trace may be valid."""
        if request.target != "cuda" or request.gpu is None:
            return ()
        # In machines with the same network, which the user names once for all GPUs.
        network = request.gpu.speeds.network if request.gpu.speeds is not None else None
        alike = dict.fromkeys(gpu.networked(network) for gpu in self._gpus)
        return tuple(gpu for gpu in alike if gpu != request.gpu)

    def _missing(self, asked: Iterable[tuple[_At, TraceRequest]]) -> dict[_At, TraceRequest]:
        """Return the requests to run: those without a known result, and those without figures for their GPU."""
        missing: dict[_At, TraceRequest] = {}
        for at, request in asked:
            known = self._find(at)
            if known is None or _of(known, request) is None:
                # Include the GPUs of the known trace, so that two plans do not drop each other's figures.
                gpus = tuple(figures.gpu for figures in known.gpus) if isinstance(known, TraceReply) else ()
                missing[at] = replace(request, others=self._others(request) or gpus)
        return missing

    def _find(self, at: _At) -> Traced | None:
        """Return the known result of a request, from memory or the cache."""
        key, capability = at
        if key not in self._known:
            self._known[key] = self.cache.get(_Document, key) or _Document()
        return self._known[key].find(capability)

    def _keep(self, at: _At, traced: Traced) -> None:
        """Store a new trace, with those of GPUs for which it is not valid, or a lasting failure.

        If two processes write the same request, the traces of one are lost, and are run again when requested.
        """
        key, capability = at
        self.new_count += 1
        if isinstance(traced, TraceReply) or traced.lasting:
            self._known[key] = self._known[key].but(capability, traced)
            self.cache.put(key, self._known[key])


def _capabilities(reply: TraceReply) -> frozenset[_Capability]:
    """Return the compute capabilities for which a trace is valid."""
    return frozenset(figures.capability for figures in reply.gpus)


def _of(traced: Traced, request: TraceRequest) -> Traced | None:
    """Return a trace's result for the request's GPU, or None if it has none."""
    if isinstance(traced, Untraceable):
        return traced
    found = next((figures for figures in traced.gpus if figures.are_of(request.gpu)), None)
    if found is None:
        return None
    others = [figures for figures in traced.gpus if figures is not found]
    timed = zip(traced.sections, found.times, strict=True)
    return replace(
        traced,
        gpus=(found, *others),
        sections=tuple(replace(section, time=time) for section, time in timed),
    )
