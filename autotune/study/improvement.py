"""The search by traces: traces next the candidates that may be faster than the best so far, by a Gaussian process."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial

import numpy as np

from autotune.core.candidate import Candidate, Choice
from autotune.core.estimate import Estimate, Runner, rank
from autotune.study.conflicts import legal_changes, next_smaller
from autotune.study.gaussian import LIKELY, Array, Codes, Figure, chances
from autotune.study.problem import Problem

Batch = Sequence[Candidate]
"""Candidates that are run at once: none of them waits for the result of another."""

MOST_TRACED = 100
"""Most candidates that a plan traces. A trace of an 8B shape takes 0.4 to 0.7 s of one core, and a candidate two to six
of them."""
_TOGETHER = 8
"""Candidates that are run at once: with fewer, tracing processes wait for each other more often."""
_PATIENCE = 24
"""Candidates in a row that bring nothing faster, after which only uncertain ones are run; after twice as many, none."""
_ALIKE = 16
"""Candidates after which a search ends if none could be run, all for the same reason."""
_WORTH = 0.002
"""Share of speed or memory that a candidate has to gain to count."""
_BEST = 3
"""Best candidates whose changes are considered, and as many that would be faster and do not fit."""
_DOUBT = 2.0
"""Standard deviations by which rates may be underestimated at last: the gain of one choice depends on the others.
Examples: LoRA of attention alone is a quarter faster than LoRA of all layers with packed rows, and a tenth with padded
rows and 4-bit weights; how much slower fewer rows are depends on such weights, dequantised for each micro-batch."""
_RANDOM = 100
"""Random candidates that are considered as well."""
_STEPS = 3
"""Further changes of the most promising candidates that are considered. With one, and four candidates at once, a plan
of an 8B shape on an H100 ended 18 % below; the recorded parts of its space do not show that."""


def search_by_traces(
    problem: Problem,
    runner: Runner,
    *,
    starts: Sequence[Candidate] | None = None,
    limit: int = MOST_TRACED,
    at_once: int = _TOGETHER,
    goes_on: Callable[[], bool] = lambda: True,
) -> bool:
    """Run candidates of a problem until none is likely to improve the best, or a limit is reached.

    Args:
        starts: candidates that are run first, after the baseline; None: the recipes.
        limit: most candidates that are run.
        at_once: most of them between two calls of ``goes_on``.
        goes_on: returns whether to continue.

    Returns:
        Whether it came to its end, instead of being ended by ``goes_on``.

    Raises:
        AutotuneError: the runner cannot run anything.
    """
    search = Improvements(problem, starts)
    known, proposals = search.known, search.proposals()
    left: list[Candidate] = []
    while goes_on() and len(known) < limit:
        left = left or list(next(proposals, ()))
        if not left or search.is_hopeless:
            return True
        most = min(limit - len(known), at_once)
        batch, left = left[:most], left[most:]
        known.update({estimate.candidate: estimate for estimate in runner.run(batch)})
    return len(known) >= limit


class Improvements:
    """A search from the baseline and the documented recipes, in the order of :meth:`proposals`.

    Two Gaussian processes over the choices expect rate and memory of candidates. Of those that differ from the best by
    a few choices, or are random, the ones whose rate may be the highest and whose memory may fit come next; at last,
    changes of the fastest that did not fit, and what may be faster if it is underestimated by a lot. While nothing
    fits, those that may need the least do. Choices that rules forbid are considered with changes that make them legal.

    Args:
        starts: what is run first after the baseline; None: the recipes.

    Attributes:
        known: results so far, by candidate. The caller adds those of each batch before it asks for the next one.
    """

    def __init__(self, problem: Problem, starts: Sequence[Candidate] | None = None) -> None:
        self.known: dict[Candidate, Estimate] = {}
        self._problem = problem
        self._starts = tuple(problem.recipes if starts is None else starts)
        self._codes = Codes(problem.choices)
        self._changes = cache(partial(legal_changes, problem))
        self._random = random.Random(0)

    @property
    def is_hopeless(self) -> bool:
        """Whether none of many candidates could be run, all for the same reason."""
        reasons = {each.reason for each in self.known.values()}
        return len(self.known) >= _ALIKE and len(reasons) == 1 and "" not in reasons

    def proposals(self) -> Iterator[Batch]:
        """Yield batches of candidates to run until none is likely to improve the best one."""
        baseline = self._problem.baseline
        yield [baseline]
        yield from self._new(self._starts)
        best = self._best()
        if best is None:
            yield from self._new(self._changes(baseline))
            best = self._best()
        since = 0
        while best is not None and (batch := next(filter(None, self._attempts(best, since)), None)):
            yield batch
            found = self._best() or best
            since = 0 if _better(found, best) else since + len(batch)
            best = found
        if best is not None:
            yield from self._rows_for_the_table(self._best() or best)

    def _attempts(self, best: Estimate, since: int) -> Iterator[Batch]:
        """Yield batches that may be empty, of which the first that is not comes next.

        Args:
            since: candidates in a row that brought nothing better.
        """
        if since < _PATIENCE:
            yield self._promising(best)
        if best.fits:
            yield self._neighbours_of_fastest_misfit(best)
        if best.fits and since < 2 * _PATIENCE:
            yield self._promising(best, _DOUBT)

    def _new(self, candidates: Iterable[Candidate]) -> Generator[Batch, None, None]:
        """Run the candidates that are legal and were not run."""
        missing = [each for each in dict.fromkeys(map(self._problem.normal, candidates)) if self._is_open(each)]
        if missing:
            yield missing

    def _is_open(self, candidate: Candidate) -> bool:
        return candidate not in self.known and self._problem.illegal(candidate) is None

    def _traced(self) -> list[Estimate]:
        found = (each for each in self.known.values() if each.memory is not None)
        return sorted((each for each in found if self._problem.illegal(each.candidate) is None), key=rank)

    def _best(self) -> Estimate | None:
        return next(iter(self._traced()), None)

    def _promising(self, best: Estimate, doubt: float = 1.0) -> list[Candidate]:
        """Return the next batch: the most promising candidate, then the next as if that one were as expected.

        Args:
            doubt: standard deviations by which a rate may be underestimated; above 1, only what may fit is considered.
        """
        need, rate = self._need(), self._rate()
        pool = self._pool(best, need, rate, doubt)
        batch: list[Candidate] = []
        while pool and len(batch) < _TOGETHER:
            scores = self._scores(best, pool, need, rate, doubt)
            index = int(np.argmax(scores))
            if scores[index] == -np.inf:
                break
            chosen = pool.pop(index)
            batch.append(chosen)
            need, rate = need.assuming(chosen), rate.assuming(chosen) if rate.predicted else rate
        return batch

    def _neighbours_of_fastest_misfit(self, best: Estimate) -> list[Candidate]:
        """Return all changes of the fastest candidate that does not fit, if it is faster.

        A choice may free memory with one other choice alone: there is little to offload where all layers are
        checkpointed.
        """
        larger = self._larger(self._rate())
        fastest = next(iter(larger), None)
        if fastest is None or larger[fastest] <= _least_worth(best):
            return []
        changes = (each for each in self._changes(fastest) if self._is_open(each))
        return [each for each in changes if self._problem.ordered.isdisjoint(each.differences(fastest))]

    def _larger(self, rate: Figure) -> dict[Candidate, float]:
        """Return what does not fit with the logarithms of the expected rates, the fastest first."""
        found = [each.candidate for each in self._traced() if not each.fits]
        return dict(sorted(zip(found, rate(found).mean, strict=True), key=lambda each: -each[1]))

    def _need(self) -> Figure:
        """Return the need of candidates, over the memory there is."""
        return Figure(self._codes, {each.candidate: _excess(each) for each in self._traced()}, {})

    def _rate(self) -> Figure:
        """Return the rate of candidates; those that cannot fit are known by their largest micro-batches alone."""
        known = self.known.values()
        scaled = {each.candidate: each.scaled_tokens_per_second or each.tokens_per_second for each in known}
        exact = {each.candidate: each.tokens_per_second for each in known}
        return Figure(self._codes, _logarithms(scaled), _logarithms(exact))

    def _scores(self, best: Estimate, pool: Sequence[Candidate], need: Figure, rate: Figure, doubt: float) -> Array:
        """Return what candidates are ordered by; minus infinity for what is not worth a trace.

        What may fit and be faster than the best comes first, by the rate that it may have; then what would be faster
        and should not fit, by the memory that it may need.
        """
        expected = need(pool)
        least = expected.mean - expected.untraced
        if not best.fits or not rate.predicted:
            return -least
        expected = rate(pool)
        gain = expected.mean + doubt * expected.untraced - _least_worth(best)
        return np.where(gain <= 0, -np.inf, np.where(least > 0, -least if doubt == 1 else -np.inf, gain))

    def _can_run(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return the candidates that can probably be run: what fails is often one choice, whatever the others are."""
        found = chances(self._codes, {each: run.memory is not None for each, run in self.known.items()}, candidates)
        return [each for each, chance in zip(candidates, found, strict=True) if chance >= LIKELY]

    def _pool(self, best: Estimate, need: Figure, rate: Figure, doubt: float) -> list[Candidate]:
        """Return open candidates: changes of the best and of what would be faster, and random ones."""
        traced = [each.candidate for each in self._traced()]
        starts = [*traced[:_BEST], *itertools.islice(self._larger(rate), _BEST)]
        pool = {change: None for each in starts for change in self._changes(each)}
        pool.update(dict.fromkeys(self._by_chance()))
        considered = self._can_run([each for each in pool if self._is_open(each)])
        for _ in range(_STEPS):
            if not considered:
                break
            first = considered[int(np.argmax(self._scores(best, considered, need, rate, doubt)))]
            further = self._can_run([e for e in self._changes(first) if e not in pool and self._is_open(e)])
            if not further:
                break
            pool.update(dict.fromkeys(further))
            considered += further
        return considered

    def _by_chance(self) -> Iterator[Candidate]:
        for _ in range(_RANDOM):
            chosen = {knob: self._random.choice(choices) for knob, choices in self._problem.choices.items()}
            yield self._problem.normal(Candidate(chosen))

    def _rows_for_the_table(self, best: Estimate) -> Iterator[Batch]:
        """Yield what is shown with the best: what needs less and is as fast, what fits with certainty, and the smallest
        changes of the baseline."""
        free = dict(self._memory_savers(best))
        if best.fits and free:
            yield from self._new([best.candidate.but(**free)])
        baseline = self.known.get(self._problem.baseline)
        if baseline is not None and best.fits and not baseline.fits:
            changed = best.candidate.differences(baseline.candidate)
            yield from self._new(baseline.candidate.but(**{knob: choice}) for knob, choice in changed.items())
        if best.fits and not best.sure:
            yield from self._new(next_smaller(self._problem, best.candidate))

    def _memory_savers(self, best: Estimate) -> Iterator[tuple[str, Choice]]:
        """Yield choices that need less memory than those of the best and cost no speed, in what was run so far."""
        for one, other in itertools.permutations(self._traced(), 2):
            changed = other.candidate.differences(one.candidate)
            if len(changed) != 1 or one.memory is None or other.memory is None:
                continue
            ((knob, choice),) = changed.items()
            if one.candidate[knob] != best.candidate[knob] or other.memory.device_bytes >= one.memory.device_bytes:
                continue
            if (other.tokens_per_second or 0.0) >= (one.tokens_per_second or 0.0):
                yield knob, choice


def _excess(estimate: Estimate) -> float:
    """Return the logarithm of the need over the memory there is."""
    memory, spare_bytes = estimate.memory, estimate.spare_bytes
    assert memory is not None
    assert spare_bytes is not None
    return math.log(max(1, memory.device_bytes) / max(1, memory.device_bytes + spare_bytes))


def _logarithms(rates: Mapping[Candidate, float | None]) -> dict[Candidate, float]:
    return {candidate: math.log(rate) for candidate, rate in rates.items() if rate}


def _least_worth(best: Estimate) -> float:
    """Return the logarithm of the rate above which a candidate is faster than the best by a share that counts."""
    return math.log((best.tokens_per_second or 1.0) * (1 + _WORTH))


def _better(found: Estimate, best: Estimate) -> bool:
    """Return whether a result is better than another by a share that counts."""
    if rank(found) >= rank(best) or found.memory is None:
        return False
    if best.memory is None or found.fits != best.fits:
        return True
    if found.fits and (found.tokens_per_second or best.tokens_per_second):
        return math.log(found.tokens_per_second or 1.0) > _least_worth(best)
    return found.memory.device_bytes < best.memory.device_bytes * (1 - _WORTH)
