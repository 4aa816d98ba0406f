"""Search by traces: repeatedly traces the candidates with the largest expected improvement over the best one."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial

import numpy as np

from autotune.core.candidate import Candidate, Choice
from autotune.core.documents.estimate import Estimate, Runner, memory_key, rank_key
from autotune.study.gaussian import MIN_CHANCE, Array, Codes, FigureModel, chances, expected_improvement, normal_cdf
from autotune.study.problem import Problem

MAX_TRACED = 100
"""Maximum number of candidates that a plan traces. A trace of an 8B model takes 0.4 to 0.7 s of one core, and a
candidate two to six traces."""
_BATCH_SIZE = 8
"""Batch size: with fewer candidates, tracing processes wait for each other more often."""
_PATIENCE = 24
"""Number of successive candidates without improvement after which only changes of the fastest misfit are run."""
_HOPELESS_AFTER = 16
"""Number of candidates after which a search ends if all have failed for one reason."""
_MIN_IMPROVEMENT = 0.001
"""Minimum expected improvement, as a share of the best rate, for which a candidate is traced."""
_RANDOM_CANDIDATES = 100
"""Number of random candidates in the pool."""
_EXPANSIONS = 3
"""Number of expansions of the pool by changes of its most promising candidate. With one, and batches of four, a plan of
an 8B model on an H100 ended 18 % below the best; the recorded parts of its space do not show that."""
_MAX_CHANGES = 3
"""Maximum number of further knobs changed for one choice: ``context_parallel`` needs changes of ``sharding``,
``pad_to_multiple_of`` and the rows of a micro-batch."""
_MAX_EXPANDED = 24
"""Maximum number of illegal candidates per distance that are expanded."""


def legal_changes(problem: Problem, candidate: Candidate) -> tuple[Candidate, ...]:
    """Return the legal candidates with one other choice, and with further changes if rules forbid that choice alone."""
    singles = ((knob, choice) for knob, each in problem.choices.items() for choice in each if choice != candidate[knob])
    return tuple(dict.fromkeys(each for single in singles for each in nearest_legal(problem, candidate, *single)))


def next_smaller(problem: Problem, candidate: Candidate) -> Iterator[Candidate]:
    """Yield the candidate with the next smaller choice of each ordered knob that has one."""
    for knob, choices in problem.choices.items():
        current = candidate[knob]
        if knob in problem.memory_ordered and isinstance(current, int):
            smaller = [each for each in choices if isinstance(each, int) and each < current]
            if smaller:
                yield candidate.but(**{knob: max(smaller)})


def nearest_legal(problem: Problem, original: Candidate, knob: str, choice: Choice) -> tuple[Candidate, ...]:
    """Return the legal candidates with a choice that differ from ``original`` in the fewest other knobs.

    A further change of a knob in conflict is kept if it makes the candidate legal, or changes the violated rule.
    """
    start = problem.normal(original.but(**{knob: choice}))
    if start[knob] != choice:
        return ()
    if problem.illegal(start) is None:
        return (start,)
    seen, frontier = {start}, [start]
    for _ in range(_MAX_CHANGES):
        legal: dict[Candidate, None] = {}
        next_frontier: list[Candidate] = []
        for candidate in frontier[:_MAX_EXPANDED]:
            reason = problem.illegal(candidate)
            for other in _neighbours(problem, candidate, knob):
                if other[knob] != choice or other in seen:
                    continue
                seen.add(other)
                other_reason = problem.illegal(other)
                if other_reason is None:
                    legal[other] = None
                elif other_reason != reason:
                    next_frontier.append(other)
        if legal:
            return tuple(legal)
        frontier = next_frontier
    return ()


def _neighbours(problem: Problem, candidate: Candidate, fixed: str) -> Iterator[Candidate]:
    """Yield variants of an illegal candidate with one other choice of a knob in conflict, except ``fixed``."""
    in_conflict = problem.knobs_of_violated_rule(candidate)
    for knob, choices in problem.choices.items():
        if knob != fixed and knob in in_conflict:
            for choice in choices:
                if choice != candidate[knob]:
                    yield problem.normal(candidate.but(**{knob: choice}))


def search_by_traces(
    problem: Problem,
    runner: Runner,
    *,
    starts: Sequence[Candidate] | None = None,
    limit: int = MAX_TRACED,
    at_once: int = _BATCH_SIZE,
    goes_on: Callable[[], bool] = lambda: True,
) -> bool:
    """Run candidates of a problem until none is likely to improve the best, or a limit is reached.

    Args:
        starts: candidates that are run first, after the baseline; None: the recipes.
        limit, at_once: maximum number of candidates, and of those between two calls of ``goes_on``.
        goes_on: returns whether to continue.

    Returns:
        Whether the search ended by itself, not by ``goes_on``.

    Raises:
        AutotuneError: the runner cannot run anything.
    """
    search = Improvements(problem, problem.recipes if starts is None else starts)
    results, proposals = search.known, search.proposals()
    queued: list[Candidate] = []
    while goes_on() and len(results) < limit:
        queued = queued or list(next(proposals, ()))
        reasons = {each.reason for each in results.values()}
        if not queued or (len(results) >= _HOPELESS_AFTER and len(reasons) == 1 and "" not in reasons):
            return True
        count = min(limit - len(results), at_once)
        batch, queued = queued[:count], queued[count:]
        results.update({estimate.candidate: estimate for estimate in runner.run(batch)})
    return len(results) >= limit


class Improvements:
    """A search from the baseline and further candidates to start from, in the order of :meth:`proposals`.

    Two Gaussian processes over the choices model rate and memory of candidates. The acquisition function is the
    expected improvement, over a pool of random candidates and of candidates that differ from the best by a few choices.
    At last, changes of the fastest candidate that does not fit are run, and changes that are expected to be faster than
    the best. While nothing fits, or no speed is known, the objective is the memory need. Choices that rules forbid are
    combined with changes that make them legal.

    Attributes:
        known: results so far, by candidate. The caller adds the results of each batch before it requests the next one.
    """

    def __init__(self, problem: Problem, starts: Sequence[Candidate]) -> None:
        self.known: dict[Candidate, Estimate] = {}
        self._problem = problem
        self._starts = starts
        self._codes = Codes(problem.choices)
        self._changes = cache(partial(legal_changes, problem))
        self._random = random.Random(0)

    def proposals(self) -> Iterator[Sequence[Candidate]]:
        """Yield batches of candidates to run until none is likely to improve the best one."""
        baseline = self._problem.baseline
        yield [baseline]
        yield from self._new(self._starts)
        if self._best() is None:
            yield from self._new(self._changes(baseline))
        best, stalled = self._best(), 0
        while best is not None and (
            batch := (self._promising(best) if stalled < _PATIENCE else [])
            or self._neighbours_of_fastest_misfit(best)
            or self._faster_changes(best)
        ):
            yield batch
            newest = self._best() or best
            stalled = 0 if _better(newest, best) else stalled + len(batch)
            best = newest
        if best is not None:
            yield from self._shown_candidates(best)

    def _new(self, candidates: Iterable[Candidate]) -> Iterator[Sequence[Candidate]]:
        """Yield the legal candidates that were not run, as one batch if there are any."""
        missing = self._open(map(self._problem.normal, candidates))
        if missing:
            yield [*missing]

    def _open(self, candidates: Iterable[Candidate]) -> dict[Candidate, None]:
        """Return the legal candidates that were not run, each once."""
        open_ones = (each for each in candidates if each not in self.known and self._problem.illegal(each) is None)
        return dict.fromkeys(open_ones)

    def _traced(self) -> list[Estimate]:
        # The baseline may be illegal.
        legal = (each for each in self.known.values() if self._problem.illegal(each.candidate) is None)
        return sorted((each for each in legal if each.memory is not None), key=rank_key)

    def _best(self) -> Estimate | None:
        return next(iter(self._traced()), None)

    def _promising(self, best: Estimate) -> list[Candidate]:
        """Return the next batch, chosen one by one, each as if the previous ones had returned their posterior means."""
        need = FigureModel(self._codes, {each.candidate: _excess(each) for each in self._traced()}, {})
        rate = self._rate()
        pool = self._pool(best, need, rate)
        batch: list[Candidate] = []
        while pool and len(batch) < _BATCH_SIZE:
            gains = self._gains(best, pool, need, rate)
            index = int(np.argmax(gains))
            if gains[index] < _MIN_IMPROVEMENT:
                break
            batch.append(chosen := pool.pop(index))
            need, rate = need.with_assumed_trace(chosen), rate.with_assumed_trace(chosen) if rate.predicted else rate
        return batch

    def _neighbours_of_fastest_misfit(self, best: Estimate) -> list[Candidate]:
        """Return all changes of the fastest candidate that does not fit, if it is faster than the best.

        A choice may save memory only with another change: if all layers are checkpointed, there is little to offload.
        """
        misfits, rate = [each.candidate for each in self._traced() if not each.fits], self._rate()
        if not best.fits or not misfits or not rate.predicted:
            return []
        rates = rate(misfits).mean
        fastest = misfits[int(np.argmax(rates))]
        if rates.max() <= math.log(best.tokens_per_second or 1.0):
            return []
        changes = [*self._open(self._changes(fastest))]
        return [each for each, chance in zip(changes, self._chances(changes), strict=True) if chance]

    def _faster_changes(self, best: Estimate) -> list[Candidate]:
        """Return changes of the best candidate that are expected to be faster, even if they are not expected to fit.

        The model of memory may be wrong about them. Example: without checkpointing, micro-batches of eight rows needed
        2.2 times as much, and those of one row 1.2 times.
        """
        changes, rate = [*self._open(self._changes(best.candidate))], self._rate()
        if not best.fits or not changes or not rate.predicted:
            return []
        ahead = rate(changes).mean - math.log(best.tokens_per_second or 1.0)
        faster = self._chances(changes) * (ahead > _MIN_IMPROVEMENT)
        return [each for each, counts in zip(changes, faster, strict=True) if counts]

    def _rate(self) -> FigureModel:
        """Return the model of the rate; for candidates that cannot fit, the rate of their largest micro-batches."""
        rates = {each.candidate: each.tokens_per_second or each.scaled_tokens_per_second for each in self._traced()}
        return FigureModel(self._codes, {each: math.log(rate) for each, rate in rates.items() if rate}, {})

    def _gains(self, best: Estimate, pool: Sequence[Candidate], need: FigureModel, rate: FigureModel) -> Array:
        """Return the expected improvement of each candidate, as a share of the best rate, or of the smallest need."""
        expected, chance = need(pool), self._chances(pool)
        if not best.fits or not rate.predicted:
            return np.asarray(chance * expected_improvement(_excess(best) - expected.mean, expected.untraced))
        fits = normal_cdf(-expected.mean, expected.untraced)
        expected = rate(pool)
        ahead = expected.mean - math.log(best.tokens_per_second or 1.0)
        return np.asarray(chance * fits * expected_improvement(ahead, expected.untraced))

    def _chances(self, candidates: Sequence[Candidate]) -> Array:
        """Return 0 for candidates that probably cannot run, and 1 for all others."""
        ran = {each: run.memory is not None for each, run in self.known.items()}
        return np.asarray(chances(self._codes, ran, candidates) >= MIN_CHANCE, float)

    def _pool(self, best: Estimate, need: FigureModel, rate: FigureModel) -> list[Candidate]:
        """Return open candidates: changes of the best one, random ones, and changes of the most promising of these."""
        choices = self._problem.choices.items()
        drawn = [{knob: self._random.choice(each) for knob, each in choices} for _ in range(_RANDOM_CANDIDATES)]
        random_ones = (self._problem.normal(Candidate(chosen)) for chosen in drawn)
        pool = self._open((*self._changes(best.candidate), *random_ones))
        for _ in range(_EXPANSIONS if pool else 0):
            promising = [*pool][int(np.argmax(self._gains(best, [*pool], need, rate)))]
            pool |= self._open(self._changes(promising))
        return [*pool]

    def _shown_candidates(self, best: Estimate) -> Iterator[Sequence[Candidate]]:
        """Yield candidates for the table of results: an equally fast one that needs less memory, the baseline with
        single choices of the best, and the next smaller ones if the best may not fit."""
        free = dict(self._memory_savers(best))
        if best.fits and free:
            yield from self._new([best.candidate.but(**free)])
        baseline = self.known.get(self._problem.baseline)
        if baseline is not None and best.fits and not baseline.fits:
            changed = best.candidate.differences(baseline.candidate)
            yield from self._new(baseline.candidate.but(**{knob: choice}) for knob, choice in changed.items())
        if best.fits and not best.fits_with_error:
            yield from self._new(next_smaller(self._problem, best.candidate))

    def _memory_savers(self, best: Estimate) -> Iterator[tuple[str, Choice]]:
        """Yield choices that need less memory than the best's without loss of speed, by pairs of results so far."""
        for one, other in itertools.permutations(self._traced(), 2):
            changed = other.candidate.differences(one.candidate)
            is_slower = (other.tokens_per_second or 0.0) < (one.tokens_per_second or 0.0)
            if len(changed) != 1 or is_slower or memory_key(other) >= memory_key(one):
                continue
            for knob, choice in changed.items():
                if one.candidate[knob] == best.candidate[knob]:
                    yield knob, choice


def _excess(estimate: Estimate) -> float:
    """Return the logarithm of the need of a traced candidate relative to the available memory."""
    need_bytes = memory_key(estimate)
    return math.log(max(1, need_bytes) / max(1, need_bytes + (estimate.spare_bytes or 0)))


def _better(challenger: Estimate, best: Estimate) -> bool:
    """Return whether a result is better than the best by at least :data:`_MIN_IMPROVEMENT`."""
    if challenger.fits != best.fits:
        return challenger.fits
    if challenger.fits and (challenger.tokens_per_second or best.tokens_per_second):
        return (challenger.tokens_per_second or 0.0) > (best.tokens_per_second or 0.0) * (1 + _MIN_IMPROVEMENT)
    return memory_key(challenger) < memory_key(best) * (1 - _MIN_IMPROVEMENT)
