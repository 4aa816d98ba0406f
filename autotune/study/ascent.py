"""Improves the front of memory and speed by changing one or two choices of its best candidates at a time."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autotune.core.candidate import Candidate, Choice
from autotune.core.estimate import Estimate, rank
from autotune.study.conflicts import nearest_legal
from autotune.study.problem import Problem

Batch = Sequence[Candidate]
"""Candidates that are run at once: none of them waits for the result of another."""
Found = Generator[Batch, None, Estimate]
"""A part of the search: yields what has to be run, and returns the candidate to go on from."""

_TOGETHER = 8
"""Single changes that are run at once, about: with fewer, tracing processes wait for each other more often."""
_PAIRS = 6
"""Pairs of changes that are run at once, those with the best expected result."""
_TOO_LARGE = 2
"""Faster candidates that do not fit, beside which all other choices are tried."""
_APART = 0.02
"""Share of speed by which such candidates differ at least."""
_FAMILY = 12
"""Most candidates of one choice that is legal with further changes alone."""
_WORTH = 0.002
"""Share of speed or memory that a change has to gain to count."""
_NEAR = 0.7
"""Share of the best speed from which a choice that takes further changes is improved by itself."""
_HOPELESS = 0.1
"""Share of speed that a change lost before, from which it is not tried again beside other choices."""
_KEPT = frozenset({"parameter", "buffer", "gradient", "optimizer state", "context", "process", "rounding"})
"""Categories of memory that do not grow with the rows of a micro-batch."""


@dataclass(frozen=True)
class _Effect:
    """What a change of one choice did: the logarithm of the factor of the speed, and the bytes that it added."""

    rate: float
    need_bytes: int


class Ascent:
    """A local search from the baseline and the documented recipes, in the order of :meth:`proposals`.

    Knobs are swept in their order: all other choices of several knobs at once, neighbours of ordered ones. What is
    faster and does not fit is repaired by smaller choices of ordered knobs, by as much as its memory at the peak
    suggests. Then pairs are tried of a change that frees memory and one that spends it, and all other choices beside
    what would be faster and does not fit. A choice that rules forbid is tried with the changes that make it legal.

    Args:
        known: results so far, by candidate. The caller adds those of each batch before it asks for the next one; what
            it leaves out is not asked for again.
        starts: what is run first beside the baseline.
    """

    def __init__(
        self, problem: Problem, known: Mapping[Candidate, Estimate], starts: Sequence[Candidate] | None = None
    ) -> None:
        self._problem = problem
        self._known = known
        self._starts = tuple(problem.recipes if starts is None else starts)
        self._knobs = [knob for knob, choices in problem.choices.items() if len(choices) > 1]
        self._asked: set[Candidate] = set()
        self._legal: dict[Candidate, bool] = {}
        self._effects: dict[tuple[str, Choice, Choice], _Effect] = {}
        self._tried: set[tuple[str, Choice]] = set()

    def proposals(self) -> Iterator[Batch]:
        """Yield batches of candidates to run until no change improves the best one."""
        baseline = self._problem.baseline
        self._asked.add(baseline)
        if baseline not in self._known:
            yield [baseline]
        yield from self._new(self._starts)
        here = self._best()
        if here is None:
            singles = ((knob, choice) for knob in self._knobs for choice in self._problem.choices[knob])
            yield from self._new(baseline.but(**{knob: choice}) for knob, choice in singles)
            here = self._best()
        while here is not None:
            start = here
            for knobs in self._portions(self._knobs):
                here = yield from self._swept(here, knobs)
            here = yield from self._paired(here)
            here = yield from self._fitted(here)
            here = yield from self._with_further_changes(here)
            if not _better(here, start):
                break
        if here is not None:
            # By less than what counts, another may be better.
            yield from self._around(self._best() or here)

    def _best(self, **choices: Choice) -> Estimate | None:
        """Return the best legal candidate that is known, of those with some choices."""
        found = (each for each in self._known.values() if each.memory is not None and self._is_legal(each.candidate))
        wanted = (each for each in found if choices.items() <= each.candidate.items())
        return min(wanted, key=rank, default=None)

    def _is_legal(self, candidate: Candidate) -> bool:
        if candidate not in self._legal:
            self._legal[candidate] = self._problem.illegal(candidate) is None
        return self._legal[candidate]

    def _new(self, candidates: Iterable[Candidate]) -> Generator[Batch, None, list[Estimate]]:
        """Run the candidates that are legal and not known; return the results of all that are known then."""
        wanted = [each for each in dict.fromkeys(map(self._problem.normal, candidates)) if self._is_legal(each)]
        missing = [each for each in wanted if each not in self._known and each not in self._asked]
        self._asked.update(missing)
        if missing:
            yield missing
        return [self._known[each] for each in wanted if each in self._known]

    def _portions(self, knobs: Sequence[str]) -> Iterator[Sequence[str]]:
        """Yield the knobs whose single changes are run at once."""
        portion: list[str] = []
        count = 0
        for knob in knobs:
            portion.append(knob)
            count += 2 if self._is_ordered(knob) else len(self._problem.choices[knob]) - 1
            if count >= _TOGETHER:
                yield portion
                portion, count = [], 0
        if portion:
            yield portion

    def _is_ordered(self, knob: str) -> bool:
        return knob in self._problem.ordered and all(isinstance(each, int) for each in self._problem.choices[knob])

    def _swept(self, here: Estimate, knobs: Sequence[str]) -> Found:
        """Return the best of what single changes of the knobs, and several of those that improve, lead to."""
        changes = [(knob, choice) for knob in knobs for choice in self._next_choices(here, knob)]
        found = yield from self._new(here.candidate.but(**{knob: choice}) for knob, choice in changes)
        self._learn(here, found)
        repaired = yield from self._repaired(here, found)
        better = sorted((each for each in (*found, *repaired) if _better(each, here)), key=rank)
        best = better[0] if better else here
        if len(better) > 1:
            best = yield from self._combined(here, better)
        for knob in knobs:
            if self._is_ordered(knob) and best.candidate[knob] != here.candidate[knob]:
                best = yield from self._along(here, best, knob)
        return best

    def _next_choices(self, here: Estimate, knob: str) -> Iterator[Choice]:
        """Yield the other choices of a knob, of an ordered one those beside that of ``here``."""
        choices: Sequence[Choice] = self._problem.choices[knob]
        if self._is_ordered(knob):
            choices = (*self._larger(here.candidate, knob)[:1], *self._smaller(here.candidate, knob)[:1])
        for choice in choices:
            if choice != here.candidate[knob] and not self._is_hopeless(here, knob, choice):
                yield choice

    def _smaller(self, candidate: Candidate, knob: str) -> list[int]:
        """Return the smaller choices of an ordered knob, the nearest first."""
        own = int(candidate[knob])
        return sorted((int(each) for each in self._problem.choices[knob] if int(each) < own), reverse=True)

    def _larger(self, candidate: Candidate, knob: str) -> list[int]:
        """Return the larger choices of an ordered knob, the nearest first."""
        own = int(candidate[knob])
        return sorted(int(each) for each in self._problem.choices[knob] if int(each) > own)

    def _is_hopeless(self, here: Estimate, knob: str, choice: Choice) -> bool:
        """Whether a change cost much speed before and freed no memory, or does not fit with a smaller choice."""
        if self._is_ordered(knob) and here.fits:
            between = (each for each in self._larger(here.candidate, knob) if each < int(choice))
            known = (self._known.get(here.candidate.but(**{knob: each})) for each in between)
            return any(other is not None and other.memory is not None and not other.fits for other in known)
        effect = self._effects.get((knob, here.candidate[knob], choice))
        if effect is None:
            return False
        return effect.rate < -_HOPELESS and here.fits if effect.need_bytes <= 0 else effect.rate < 0

    def _learn(self, here: Estimate, found: Iterable[Estimate]) -> None:
        """Remember what single changes did."""
        for each in found:
            changed = each.candidate.differences(here.candidate)
            if len(changed) == 1 and each.memory is not None and here.memory is not None:
                ((knob, choice),) = changed.items()
                rates = each.tokens_per_second, here.tokens_per_second
                rate = math.log(rates[0] / rates[1]) if rates[0] and rates[1] else 0.0
                added_bytes = each.memory.device_bytes - here.memory.device_bytes
                self._effects[knob, here.candidate[knob], choice] = _Effect(rate, added_bytes)

    def _run(self, here: Estimate, candidates: Iterable[Candidate]) -> Generator[Batch, None, list[Estimate]]:
        """Run candidates; return their results, and those of what is repaired of them."""
        found = yield from self._new(candidates)
        repaired = yield from self._repaired(here, found)
        return [*found, *repaired]

    def _repaired(self, here: Estimate, found: Sequence[Estimate]) -> Generator[Batch, None, list[Estimate]]:
        """Return what is faster and does not fit, with smaller choices of ordered knobs with which it should."""
        repaired: list[Estimate] = []
        left = [each for each in found if _would_be_faster(each, here)]
        while left:
            smaller = [candidate for each in left for candidate in self._expected_to_fit(each)]
            known = yield from self._new(smaller)
            repaired += known
            tried = {each.candidate for each in left}
            left = [each for each in known if _would_be_faster(each, here) and each.candidate not in tried]
        return repaired

    def _expected_to_fit(self, found: Estimate) -> Iterator[Candidate]:
        """Yield a candidate with a smaller choice of each ordered knob: the largest that is expected to fit."""
        memory, spare_bytes = found.memory, found.spare_bytes
        assert memory is not None
        assert spare_bytes is not None
        fixed_bytes = sum(size for name, size in memory.breakdown.items() if name in _KEPT)
        for knob in filter(self._is_ordered, self._knobs):
            for choice in self._smaller(found.candidate, knob):
                freed_bytes = (memory.device_bytes - fixed_bytes) * (1 - choice / int(found.candidate[knob]))
                if spare_bytes + freed_bytes >= 0:
                    yield found.candidate.but(**{knob: choice})
                    break

    def _combined(self, here: Estimate, better: Sequence[Estimate]) -> Found:
        """Return the best of several improvements together: all of them, and the best with each of the others."""
        merged: dict[str, Choice] = {}
        for each in better:
            for knob, choice in each.candidate.differences(here.candidate).items():
                merged.setdefault(knob, choice)
        first = better[0].candidate
        own = first.differences(here.candidate)
        others = (each.candidate.differences(here.candidate) for each in better[1:])
        seconds = [first.but(**changed) for changed in others if not own.keys() & changed.keys()]
        found = yield from self._run(better[0], [here.candidate.but(**merged), *seconds[:1]])
        return min((*better, *found), key=rank)

    def _along(self, here: Estimate, best: Estimate, knob: str) -> Found:
        """Return the best of further steps of an ordered knob in the direction that improved."""
        up = int(best.candidate[knob]) > int(here.candidate[knob])
        while further := (self._larger if up else self._smaller)(best.candidate, knob):
            found = yield from self._new([best.candidate.but(**{knob: further[0]})])
            if not found or not _better(found[0], best):
                break
            best = found[0]
        return best

    def _paired(self, here: Estimate) -> Found:
        """Return the best of pairs of changes that are expected to be an improvement, though neither is one alone."""
        best = here
        for _ in range(2):
            pairs = sorted(self._pairs(best), key=lambda item: item[0])
            found = yield from self._run(best, [candidate for _, candidate in pairs[:_PAIRS]])
            better = min((best, *found), key=rank)
            if not _better(better, best):
                break
            best = better
        return best

    def _pairs(self, here: Estimate) -> Iterator[tuple[float, Candidate]]:
        """Yield candidates with two changes whose effects together are expected to improve, with a key to sort by."""
        memory, spare_bytes = here.memory, here.spare_bytes
        if memory is None or spare_bytes is None:
            return
        own = [
            (knob, choice, effect)
            for (knob, before, choice), effect in self._effects.items()
            if here.candidate[knob] == before
        ]
        for number, (knob, choice, effect) in enumerate(own):
            for other_knob, other_choice, other in own[number + 1 :]:
                if knob == other_knob:
                    continue
                rate, added_bytes = effect.rate + other.rate, effect.need_bytes + other.need_bytes
                fits = added_bytes <= spare_bytes
                if here.fits and not (fits and rate > _WORTH):
                    continue
                if not here.fits and added_bytes > -_WORTH * memory.device_bytes:
                    continue
                candidate = self._problem.normal(here.candidate.but(**{knob: choice, other_knob: other_choice}))
                if candidate not in self._asked and candidate not in self._known and self._is_legal(candidate):
                    yield (-rate if here.fits else float(added_bytes)), candidate

    def _fitted(self, here: Estimate) -> Found:
        """Return the best of what other choices make fit of candidates that would be faster.

        A choice may free memory beside these alone: there is little to offload where all layers are checkpointed.
        """
        best = here
        for start in self._too_large(here)[:_TOO_LARGE]:
            knobs = [knob for knob in self._knobs if not self._is_ordered(knob)]
            changes = ((knob, choice) for knob in knobs for choice in self._next_choices(start, knob))
            found = yield from self._new(start.candidate.but(**{knob: choice}) for knob, choice in changes)
            freed: dict[str, Choice] = {}
            for each in sorted((each for each in found if _would_be_faster(each, best)), key=rank)[:2]:
                freed.update(each.candidate.differences(start.candidate))
            both = yield from self._new([start.candidate.but(**freed)])
            repaired = yield from self._repaired(best, [*found, *both])
            best = min((best, *found, *both, *repaired), key=rank)
        return best

    def _too_large(self, here: Estimate) -> list[Estimate]:
        """Return the candidates that would be faster and do not fit, the fastest first; of equally fast ones, the one
        that needs the least."""
        faster = [
            each for each in self._known.values() if _would_be_faster(each, here) and self._is_legal(each.candidate)
        ]
        found: dict[int, Estimate] = {}
        for each in sorted(faster, key=rank):
            found.setdefault(round(math.log(each.tokens_per_second or 1.0) / _APART), each)
        return [found[rate] for rate in sorted(found, reverse=True)]

    def _with_further_changes(self, here: Estimate) -> Found:
        """Return the best of what choices lead to that rules forbid beside ``here`` without further changes."""
        best = here
        for knob in self._knobs:
            for choice in self._problem.choices[knob]:
                if choice == best.candidate[knob] or (knob, choice) in self._tried:
                    continue
                near = nearest_legal(self._problem, best.candidate, knob, choice)
                if not near or len(near[0].differences(best.candidate)) < 2:
                    continue
                self._tried.add((knob, choice))
                best = yield from self._family(best, knob, choice, near)
        return best

    def _family(self, here: Estimate, knob: str, choice: Choice, near: Sequence[Candidate]) -> Found:
        """Return the best candidate with a choice that takes further changes, if it is better than ``here``."""
        known = self._best(**{knob: choice})
        alike = sorted(near, key=lambda each: len(each.differences(known.candidate)) if known is not None else 0)
        yield from self._new(alike[:3])
        start = self._best(**{knob: choice})
        if start is None or not _is_near(start, here):
            return here
        coupled = {other for each in near for other in each.differences(here.candidate)} - {knob}
        coupled |= {other for other in self._knobs if self._is_ordered(other)}
        limit = len(self._asked) + _FAMILY
        while len(self._asked) < limit:
            best = start
            for knobs in self._portions([other for other in self._knobs if other in coupled]):
                best = yield from self._swept(best, knobs)
            if best.candidate[knob] != choice or not _better(best, start):
                break
            start = best
        return min((here, start), key=rank)

    def _around(self, here: Estimate) -> Iterator[Batch]:
        """Yield what is shown beside the best: what needs less and is as fast, what fits with certainty, and the
        smallest changes of the baseline."""
        free = {
            knob: choice
            for (knob, before, choice), effect in self._effects.items()
            if here.candidate[knob] == before and effect.rate >= 0 and effect.need_bytes < 0
        }
        if here.fits and free:
            yield from self._new([here.candidate.but(**free)])
        baseline = self._known.get(self._problem.baseline)
        if baseline is not None and here.fits and not baseline.fits:
            changed = here.candidate.differences(baseline.candidate)
            yield from self._new(baseline.candidate.but(**{knob: choice}) for knob, choice in changed.items())
        if here.fits and not here.sure:
            ordered = filter(self._is_ordered, self._knobs)
            steps = ((knob, each) for knob in ordered for each in self._smaller(here.candidate, knob)[:1])
            yield from self._new(here.candidate.but(**{knob: choice}) for knob, choice in steps)


def _better(found: Estimate, here: Estimate) -> bool:
    """Return whether a result is better than another by a share that counts."""
    if rank(found) >= rank(here) or found.memory is None:
        return False
    if here.memory is None or found.fits != here.fits:
        return True
    if found.fits and (found.tokens_per_second or here.tokens_per_second):
        return _rate(found) > _rate(here) * (1 + _WORTH)
    return found.memory.device_bytes < here.memory.device_bytes * (1 - _WORTH)


def _would_be_faster(found: Estimate, here: Estimate) -> bool:
    """Return whether a candidate does not fit and would be better than another if it did."""
    return found.memory is not None and not found.fits and here.fits and _rate(found) > _rate(here) * (1 + _WORTH)


def _is_near(found: Estimate, here: Estimate) -> bool:
    """Return whether a candidate is so near to another that improving it may be worth its traces."""
    return found.memory is not None and (not here.fits or _rate(found) >= _NEAR * _rate(here))


def _rate(found: Estimate) -> float:
    return found.tokens_per_second or 0.0
