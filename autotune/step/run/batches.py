"""Chooses the rows that a probe trains on and their order: the worst micro-batches first, then typical ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice

import numpy as np

from autotune.core.blocks import block_rows
from autotune.core.measurement import Schedule
from autotune.step.rows import Counts, Flags, RowSizes
from autotune.step.run.worst import narrower, unpadded, worst_order
from autotune.step.trainers.base import Collation, Drawing

_STEADY_FROM = 2
"""Number of micro-batches after which a step's peak does not change: gradients exist from the second one on."""
_DRAWN_FOR_ONE = 8
"""Number of micro-batches drawn per typical one that is kept."""


@dataclass(frozen=True)
class StepSize:
    """The size of one optimizer step, given by the plan.

    Attributes:
        rows: rows per micro-batch (``per_device_train_batch_size``).
        micro_batches: micro-batches per optimizer step (``gradient_accumulation_steps``).
        drawing: how rows are drawn; None: those of each micro-batch by themselves.
    """

    rows: int
    micro_batches: int
    drawing: Drawing | None = None

    @property
    def drawn(self) -> Drawing:
        """How rows are drawn."""
        return self.drawing or Drawing(self.rows)

    def run(self, *, whole: bool) -> int:
        """Return the number of micro-batches of a step that are run: all, or as many as are needed for its peak."""
        return self.micro_batches if whole else min(self.micro_batches, _STEADY_FROM)

    def run_uses(self, *, whole: bool) -> int:
        """Return the number of consecutive micro-batches that are run on rows drawn at once.

        If rows are drawn for several steps that are not run whole, only the run micro-batches of each step count.
        """
        in_step, uses = self.run(whole=whole), self.drawn.uses
        return uses if uses <= in_step else in_step * max(1, uses // self.micro_batches)


@dataclass(frozen=True)
class Batches:
    """The rows that a probe trains on.

    Attributes:
        population: rows that the trainer iterates over in an epoch.
        rows: rows of a micro-batch.
        step_micro_batches: micro-batches of an optimizer step as run.
        order: row indices as the data loader yields them for each micro-batch; shape (micro-batches, rows).
        worst: indices of the worst micro-batches that run when gradients and optimizer state exist; one of each kind.
        worst_steps: number of steps at the beginning that contain worst micro-batches.
        uses: micro-batches of a step that are run on the same rows, one after another.
        is_worst: which micro-batches are worst ones; shape (micro-batches,).
        timed: which micro-batches are typical and not used for warm-up; shape (micro-batches,).
        collated: tokens of each micro-batch, padding included; shape (micro-batches,).
        mean_tokens: mean dataset tokens of a micro-batch over an epoch.
        mean_collated: mean tokens of a micro-batch over an epoch, padding included.
        mean_documents: mean dataset rows in a micro-batch; fractional where dataset rows were split or packed.
    """

    population: int
    rows: int
    step_micro_batches: int
    order: Counts
    worst: tuple[int, ...]
    worst_steps: int
    uses: int
    is_worst: Flags
    timed: Flags
    collated: Counts
    mean_tokens: float
    mean_collated: float
    mean_documents: float

    @property
    def steps(self) -> int:
        """The number of optimizer steps."""
        return len(self.order) // self.step_micro_batches

    @property
    def worst_at_once(self) -> int:
        """How many worst draws of rows at the end of a step run when gradients exist, as they have to."""
        return _after_others(self.step_micro_batches // self.uses)


def plan_batches(
    sizes: RowSizes,
    step: StepSize,
    collation: Collation,
    schedule: Schedule,
    seed: int,
    packed_from: int | None,
    *,
    compiled: bool = False,
    unmasked: bool = False,
    rehearsed: bool = False,
) -> Batches:
    """Choose the batches of a probe.

    The first micro-batch is the worst. From the second step on, when optimizer state exists, each kind of worst
    micro-batch ends a step, when gradients exist as well, unless only time is measured. Typical micro-batches before
    them serve as warm-up.

    If whole steps are run, typical micro-batches are in the order of a random sampler. A probe that times only a few
    uses a stratified sample of many (Cochran, Sampling Techniques, 3rd edition, chapter 5), with as many strata by size
    as the minimum number of timed micro-batches.

    Rows that are drawn at once for several micro-batches count as one micro-batch here.

    Example: with steps of two micro-batches and the worst micro-batch W, a probe runs (W, typical), (typical, W), and
    then steps of typical ones, which it times.

    Args:
        sizes: sizes of the rows that the trainer iterates over, after packing and dropping.
        seed: seed of the order of typical batches.
        packed_from: number of dataset rows that were packed into those of ``sizes``, or None without packing.
        compiled: whether code is compiled for the first micro-batch, and recompiled for others; if so, those of
            :func:`autotune.trainers.micro_batches.MicroBatches.compiled_again` follow the first.
        unmasked: whether micro-batches without padding may need the most memory, too
            (:func:`autotune.techniques.attention.unmasked_may_need_more`); if so, the widest is one of the worst.
        rehearsed: whether each timed step runs once before without timing, if rows differ in width. A GPU's kernels are
            compiled, loaded and planned at the first run of each size (Triton, cuBLAS, cuDNN's attention): a whole
            training pays that once per size, but nearly every micro-batch of a probe would.

    Raises:
        ValueError: the trainer has dropped every row.
    """
    if not len(sizes.tokens):
        raise ValueError("the trainer drops every row of the dataset")
    whole, at_once, population = schedule.whole_steps, step.drawn.rows, len(sizes.tokens)
    micro_batches, uses = step.run(whole=whole), step.run_uses(whole=whole)
    schedule, in_step = _of_draws(schedule, uses), max(1, micro_batches // uses)
    draw = partial(_drawn_batches, population, at_once, seed=seed, blocks=collation.blocks)
    worst = worst_order(sizes, at_once, collation)
    without_padding = unpadded(sizes, at_once, collation) if compiled or unmasked else ()
    begins = [worst[0], *((*narrower(sizes, at_once, collation), *without_padding) if compiled else ())]
    worst = (*worst, *(without_padding if unmasked else ()))
    opening = _opening(begins, () if schedule.timing_only else worst, in_step)
    begun = -(-len(begins) // in_step) * in_step
    beside_worst = sum(rows is None for rows in opening)
    warmup = max(0, -(-(schedule.warmup_micro_batches - beside_worst) // in_step)) * in_step
    following = max(-(-schedule.max_micro_batches // in_step), 2) * in_step + schedule.worst_last * in_step
    rest: Iterator[Counts] = iter(draw(beside_worst + warmup + following))
    if not whole:
        sample = _stratified(sizes, at_once, following, schedule.min_micro_batches, collation, seed)
        rest = chain(islice(rest, beside_worst + warmup), sample)
    chosen = np.stack([*(next(rest) if rows is None else rows for rows in opening), *rest])
    places = [place for place, rows in enumerate(opening) if rows is not None and place >= begun]
    is_worst = np.zeros(len(chosen), dtype=bool)
    is_worst[[0, *places]] = True
    timed_from = begun if whole else len(opening) + warmup
    warm = (np.cumsum(~is_worst) > schedule.warmup_micro_batches) & (np.arange(len(chosen)) >= timed_from)
    # What is drawn at once is more or less than one micro-batch.
    share = step.rows / at_once
    collated = np.where(is_worst, collation.tokens(_grown(sizes), chosen), collation.tokens(sizes, chosen)) * share
    run, timed = np.arange(len(chosen)), ~is_worst & warm
    # Decided by all rows, not by this rank's, since all ranks have to run the same number of steps.
    if rehearsed and np.ptp(collation.rounded(sizes.widest)):
        run, rehearsal = _twice(len(chosen), in_step, len(opening) + (0 if whole else warmup))
        timed = timed[run] & ~rehearsal
    epoch = draw(max(1, population // at_once) if collation.blocks else -(-population // at_once))
    return Batches(
        population=population * step.drawn.uses * step.drawn.shared * step.rows // at_once,
        rows=step.rows,
        step_micro_batches=micro_batches,
        order=np.repeat(np.repeat(chosen[run], step.drawn.copies, axis=1), uses, axis=0),
        worst=tuple((place + 1) * uses - 1 for place in places),
        worst_steps=len(opening) * uses // micro_batches,
        uses=min(uses, micro_batches),
        is_worst=np.repeat(is_worst[run], uses),
        timed=np.repeat(timed, uses),
        collated=np.repeat(collated[run].astype(np.int64), uses),
        mean_tokens=float(sizes.tokens.mean() * step.rows),
        mean_collated=float(collation.tokens(sizes, epoch).mean() * share),
        mean_documents=step.rows * (1.0 if packed_from is None else packed_from / population),
    )


def _opening(begins: Sequence[Counts], ends: Sequence[Counts], in_step: int) -> list[Counts | None]:
    """Return the micro-batches of the first steps, ``in_step`` each; None stands for a typical one.

    Example: of steps of three, ``begins`` of one micro-batch and ``ends`` of three give ``begin, -, -``, then
    ``-, end, end`` and ``-, -, end``: a micro-batch of ``ends`` always follows another one of its step.

    Args:
        begins: the micro-batches to begin with.
        ends: those to end the steps after that with.
    """
    opening: list[Counts | None] = [*begins, *[None] * (-len(begins) % in_step)]
    for start in range(0, len(ends), _after_others(in_step)):
        end = ends[start : start + _after_others(in_step)]
        opening += [*[None] * (in_step - len(end)), *end]
    return opening


def drawn(population: int, count: int, seed: int) -> Counts:
    """Return ``count`` indices in the order of a random sampler: random permutations, one epoch after another."""
    generator = np.random.default_rng(seed)
    epochs = [generator.permutation(population) for _ in range(-(-count // population))]
    return np.concatenate(epochs)[:count]


def _drawn_batches(population: int, rows: int, count: int, seed: int, *, blocks: bool) -> Counts:
    """Return the rows of ``count`` micro-batches in random order; shape (count, rows).

    Args:
        blocks: whether micro-batches are blocks of successive rows. A last block with fewer rows is left out.
    """
    if not blocks:
        return drawn(population, count * rows, seed).reshape(-1, rows)
    whole = max(1, population // rows)
    return np.asarray(block_rows(population, rows)[drawn(whole, count, seed)])


def _stratified(sizes: RowSizes, rows: int, count: int, strata: int, collation: Collation, seed: int) -> Counts:
    """Return at least ``count`` micro-batches in rounds, each with one micro-batch from every stratum by size."""
    generator = np.random.default_rng(seed)
    rounds = -(-count // strata)
    many = _drawn_batches(len(sizes.tokens), rows, rounds * strata * _DRAWN_FOR_ONE, seed, blocks=collation.blocks)
    taken = []
    for micro_batches in many.reshape(rounds, -1, rows):
        by_size = np.argsort(collation.tokens(sizes, micro_batches), kind="stable").reshape(strata, -1)
        picked = by_size[np.arange(strata), generator.integers(_DRAWN_FOR_ONE, size=strata)]
        taken.append(micro_batches[generator.permutation(picked)])
    return np.concatenate(taken)[:count]


def _twice(count: int, in_step: int, start: int) -> tuple[Counts, Flags]:
    """Return the places of micro-batches, those of each step from ``start`` on twice, and which are not to be timed:
    the first of two, and all before."""
    later = np.arange(start, count).reshape(-1, 1, in_step).repeat(2, axis=1)
    first = np.zeros(later.shape, dtype=bool)
    first[:, 0] = True
    return np.concatenate([np.arange(start), later.ravel()]), np.concatenate([np.ones(start, bool), first.ravel()])


def _of_draws(schedule: Schedule, uses: int) -> Schedule:
    """Return a schedule that counts draws of rows instead of micro-batches."""
    return replace(
        schedule,
        warmup_micro_batches=-(-schedule.warmup_micro_batches // uses),
        min_micro_batches=-(-schedule.min_micro_batches // uses),
        max_micro_batches=-(-schedule.max_micro_batches // uses),
    )


def _grown(sizes: RowSizes) -> RowSizes:
    """Return the sizes of rows to which the model adds as many tokens as it may."""
    if sizes.generated is None:
        return sizes
    return replace(sizes, generated=np.full_like(sizes.generated, sizes.most_generated))


def _after_others(in_step: int) -> int:
    """Return how many micro-batches of a step follow another one of it; 1 for a step of a single micro-batch."""
    return max(1, in_step - 1)
