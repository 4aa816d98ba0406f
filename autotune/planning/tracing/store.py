"""Looks traces up in memory and in the cache on disk, and runs the missing ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from autotune.core.gpu import Gpu
from autotune.core.jobs.traced import TraceReply, TraceRequest
from autotune.core.workload import ModelSource
from autotune.planning.tracing.cache import Cache, fingerprint
from autotune.planning.tracing.operators import OperatorTimes
from autotune.probing.tracing import Traced, Untraceable

Tracer = Callable[[Sequence[TraceRequest]], Iterable[Traced]]
"""Runs traces; yields the results in the order of the requests, possibly one by one."""

_Capability = tuple[int, int] | None
_Key = tuple[str, _Capability]
"""The fingerprint of a request without its GPU, and the GPU's compute capability."""


class Traces:
    """Store of traces, by request; one is valid for all of ``gpus`` on which PyTorch selects the same kernels.

    Args:
        versions: versions of the software that traces depend on, by name.
        gpus: all GPUs to trace for, if there are several.

    Attributes:
        times: measured times of operators, which replace predicted ones; None: keep predictions.
        new_count: number of traces that were run because the cache lacked them.
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
        self.cache = cache
        self.times = times
        self._tracer = tracer
        self._gpus = tuple(gpus)
        self._identity = (model_fingerprint, dict(versions))
        self._replies: dict[str, tuple[TraceReply, ...]] = {}
        self._failures: dict[_Key, Untraceable | None] = {}
        self._requested: dict[int, Traced] = {}
        self.new_count = 0

    @property
    def count(self) -> int:
        """Number of distinct traces that were returned."""
        return len(self._requested)

    def get(self, requests: Sequence[TraceRequest]) -> list[Traced]:
        """Return the traces of requests, in their order; runs missing ones, the deepest first, and stores each.

        Raises:
            AutotuneError: traces cannot be run; those that ended before are stored.
        """
        requests = [replace(request, operators=self.times is not None) for request in requests]
        keys = [self._key(request) for request in requests]
        missing: dict[_Key, TraceRequest] = {}
        for key, request in zip(keys, requests, strict=True):
            known = self._find(key)
            # A new trace also has the figures of the GPUs of the known one, which it replaces.
            gpus = tuple(figures.gpu for figures in known.gpus) if isinstance(known, TraceReply) else ()
            if known is None or _for_gpu(known, request) is None:
                missing[key] = replace(request, others=self._other_gpus(request) or gpus)
        deepest_first = sorted(missing, key=lambda key: missing[key].layers or 0, reverse=True)
        new: dict[_Key, Traced] = {}
        if missing:
            # No other reference to the iterator, so that an error here closes it.
            for key, traced in zip(deepest_first, self._tracer([missing[key] for key in deepest_first]), strict=True):
                new[key] = traced
                self._store(key, traced)
        traces = [known for key in keys if (known := new.get(key) or self._find(key))]
        self._requested.update((id(traced), traced) for traced in traces)
        results = [_for_gpu(traced, request) or traced for traced, request in zip(traces, requests, strict=True)]
        return self.times.with_measured_times(results) if self.times is not None else results

    def _key(self, request: TraceRequest) -> _Key:
        # Fingerprints identify model and dataset, not paths. GPUs of one compute capability run the same kernels.
        capability = request.gpu.compute_capability if request.gpu is not None else None
        chosen = request.chosen and replace(request.chosen, directory="")
        without_gpu = replace(request, model=ModelSource(""), gpu=None, others=(), chosen=chosen)
        return fingerprint("trace", without_gpu, self._identity), capability

    def _other_gpus(self, request: TraceRequest) -> tuple[Gpu, ...]:
        """Return other GPUs for which a request's trace may be valid."""
        if request.target != "cuda" or request.gpu is None:
            return ()
        # The user names one network for all GPUs.
        network = request.gpu.speeds.network if request.gpu.speeds is not None else None
        return tuple(gpu for each in self._gpus if (gpu := each.networked(network)) != request.gpu)

    def _find(self, key: _Key) -> Traced | None:
        """Return the known result of a request, from memory or the cache."""
        name, capability = key
        if name not in self._replies:
            self._replies[name] = self.cache.get(tuple[TraceReply, ...], name) or ()
        if key not in self._failures:
            self._failures[key] = self.cache.get(Untraceable, fingerprint(key))
        traces = (reply for reply in self._replies[name] if capability in _capabilities(reply))
        return self._failures[key] or next(traces, None)

    def _store(self, key: _Key, traced: Traced) -> None:
        """Store a new trace or a lasting failure; a trace replaces those that are valid for no other GPUs."""
        name, _ = key
        self.new_count += 1
        if isinstance(traced, TraceReply):
            # Traces that another process stores meanwhile are lost.
            others = (reply for reply in self._replies[name] if not _capabilities(reply) <= _capabilities(traced))
            self._replies[name] = (traced, *others)
            self.cache.put(name, self._replies[name])
        elif traced.lasting:
            self._failures[key] = traced
            self.cache.put(fingerprint(key), traced)


def _capabilities(reply: TraceReply) -> frozenset[_Capability]:
    """Return the compute capabilities for which a trace is valid."""
    return frozenset(figures.capability for figures in reply.gpus)


def _for_gpu(traced: Traced, request: TraceRequest) -> Traced | None:
    """Return a trace with the figures of the request's GPU first; a failure unchanged; None without such figures."""
    if isinstance(traced, Untraceable):
        return traced
    own = next((figures for figures in traced.gpus if figures.are_of(request.gpu)), None)
    if own is None:
        return None
    others = [figures for figures in traced.gpus if figures is not own]
    timed = zip(traced.sections, own.times, strict=True)
    return replace(
        traced,
        gpus=(own, *others),
        sections=tuple(replace(section, time=time) for section, time in timed),
    )
