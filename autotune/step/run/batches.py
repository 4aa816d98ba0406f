"""Chooses the micro-batches of a probe: the worst ones first, then typical ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice

import numpy as np

from autotune.core.measurement import Schedule
from autotune.core.rows.blocks import block_rows
from autotune.step.rows import Counts, Flags, RowSizes
from autotune.step.run.worst import next_narrower, unpadded, worst_order
from autotune.step.trainers.base import Collation, Drawing

_MICRO_BATCHES_TO_STEADY = 2
"""Micro-batches after which a step's peak does not change: gradients exist from the second one on."""
_DRAWS_PER_KEPT = 8
"""Micro-batches drawn per typical one in a stratified sample."""


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

    def executed(self, *, whole: bool) -> int:
        """Return the number of micro-batches of a step that are run: all, or the fewest with the step's peak."""
        return self.micro_batches if whole else min(self.micro_batches, _MICRO_BATCHES_TO_STEADY)

    def executed_uses(self, *, whole: bool) -> int:
        """Return the number of consecutive executed micro-batches on rows drawn at once.

        If rows are drawn for several steps that are not run whole, only the executed micro-batches of each step count;
        if they are drawn several times in a step that is not run whole, each executed micro-batch is on its own rows.
        """
        in_step, uses = self.executed(whole=whole), self.drawn.uses
        if in_step < self.micro_batches and uses % self.micro_batches:
            return 1
        return uses if uses <= in_step else in_step * max(1, uses // self.micro_batches)


@dataclass(frozen=True)
class Batches:
    """The rows that a probe trains on.

    Attributes:
        population: rows that the trainer iterates over in an epoch.
        rows: rows of a micro-batch.
        step_micro_batches: executed micro-batches of an optimizer step.
        order: row indices as the data loader yields them for each micro-batch; shape (micro-batches, rows).
        worst: indices of the worst micro-batches that run when gradients and optimizer state exist; one of each kind.
        worst_steps: number of steps at the beginning that contain worst micro-batches.
        uses: consecutive micro-batches of a step that run on the same rows.
        is_worst: which micro-batches are worst ones; shape (micro-batches,).
        is_unpadded: which are chosen for having no padding, if others have some; shape (micro-batches,).
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
    is_unpadded: Flags
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
    def longest(self) -> Flags:
        """The rows whose completions have the maximum length, if completions are generated.

        Shape (micro-batches, rows). They are the first of each worst micro-batch, and all of one without padding.
        """
        found = np.zeros(self.order.shape, dtype=bool)
        found[self.is_worst, 0] = True
        found[self.is_unpadded] = True
        return found

    @property
    def worst_at_once(self) -> int:
        """The number of draws of rows in a step that run when gradients exist, so that they can be worst ones."""
        return _num_followers(self.step_micro_batches // self.uses)


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
    rehearse: bool = False,
) -> Batches:
    """Choose the batches of a probe.

    The first micro-batch is the worst. From the second step on, when optimizer state exists, each kind of worst
    micro-batch ends a step, when gradients exist as well, unless only time is measured. Typical micro-batches before
    them serve as warm-up.

    If whole steps are run, typical micro-batches are in the order of a random sampler. A probe that times only a few
    uses a stratified sample of many (Cochran, Sampling Techniques, 3rd edition, chapter 5), with as many strata by size
    as the minimum number of timed micro-batches.

    Rows drawn at once for several micro-batches count as one micro-batch here.

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
        rehearse: whether each timed step runs once before without timing, if rows differ in width. A GPU's kernels are
            compiled, loaded and planned at the first run of each size (Triton, cuBLAS, cuDNN's attention): a whole
            training pays that once per size, but nearly every micro-batch of a probe would.

    Raises:
        ValueError: the trainer has dropped every row.
    """
    if not len(sizes.tokens):
        raise ValueError("the trainer drops every row of the dataset")
    whole, draw_rows, population = schedule.whole_steps, step.drawn.rows, len(sizes.tokens)
    micro_batches, uses = step.executed(whole=whole), step.executed_uses(whole=whole)
    schedule, in_step = _count_draws(schedule, uses), max(1, micro_batches // uses)
    draw = partial(_draw_micro_batches, population, draw_rows, seed=seed, blocks=collation.blocks)
    worst = worst_order(sizes, draw_rows, collation)
    without_padding = unpadded(sizes, draw_rows, collation) if compiled or unmasked else ()
    first_batches = [worst[0], *((*next_narrower(sizes, draw_rows, collation), *without_padding) if compiled else ())]
    worst = (*worst, *(without_padding if unmasked else ()))
    opening = _opening(first_batches, () if schedule.timing_only else worst, in_step)
    first_count = -(-len(first_batches) // in_step) * in_step
    typical_in_opening = sum(rows is None for rows in opening)
    warmup = max(0, -(-(schedule.warmup_micro_batches - typical_in_opening) // in_step)) * in_step
    following = max(-(-schedule.max_micro_batches // in_step), 2) * in_step + schedule.worst_last * in_step
    typical: Iterator[Counts] = iter(draw(typical_in_opening + warmup + following))
    if not whole:
        sample = _stratified(sizes, draw_rows, following, schedule.min_micro_batches, collation, seed)
        typical = chain(islice(typical, typical_in_opening + warmup), sample)
    chosen = np.stack([*(next(typical) if rows is None else rows for rows in opening), *typical])
    places = [place for place, rows in enumerate(opening) if rows is not None and place >= first_count]
    is_worst, is_unpadded = np.zeros((2, len(chosen)), dtype=bool)
    is_worst[[0, *places]] = True
    for place, rows in enumerate(opening):
        is_unpadded[place] = any(rows is each for each in without_padding)
    timed_from = first_count if whole else len(opening) + warmup
    is_warm = (np.cumsum(~is_worst) > schedule.warmup_micro_batches) & (np.arange(len(chosen)) >= timed_from)
    # A draw of rows may be larger or smaller than a micro-batch.
    share = step.rows / draw_rows
    grown = _at_max_generation(sizes)
    collated = np.where(is_worst, collation.tokens(grown, chosen), collation.tokens(sizes, chosen)) * share
    executed, timed = np.arange(len(chosen)), ~is_worst & is_warm
    # Decided by all rows, not by this rank's: all ranks have to run the same number of steps.
    if rehearse and np.ptp(sizes.row_summary.rounded(collation.multiple)):
        executed, rehearsal = _with_rehearsals(len(chosen), in_step, len(opening) + (0 if whole else warmup))
        timed = timed[executed] & ~rehearsal
    epoch = draw(max(1, population // draw_rows) if collation.blocks else -(-population // draw_rows))
    return Batches(
        population=population * step.drawn.uses * step.drawn.shared * step.rows // draw_rows,
        rows=step.rows,
        step_micro_batches=micro_batches,
        order=np.repeat(np.repeat(chosen[executed], step.drawn.copies, axis=1), uses, axis=0),
        worst=tuple((place + 1) * uses - 1 for place in places),
        worst_steps=len(opening) * uses // micro_batches,
        uses=min(uses, micro_batches),
        is_worst=np.repeat(is_worst[executed], uses),
        is_unpadded=np.repeat(is_unpadded[executed], uses),
        timed=np.repeat(timed, uses),
        collated=np.repeat(collated[executed].astype(np.int64), uses),
        mean_tokens=float(sizes.tokens.mean() * step.rows),
        mean_collated=float(collation.tokens(sizes, epoch).mean() * share),
        mean_documents=step.rows * (1.0 if packed_from is None else packed_from / population),
    )


def _opening(begins: Sequence[Counts], ends: Sequence[Counts], in_step: int) -> list[Counts | None]:
    """Return the micro-batches of the first steps, ``in_step`` each; None stands for a typical one.

    Example: of steps of three, ``begins`` of one micro-batch and ``ends`` of three give ``begin, -, -``, then
    ``-, end, end`` and ``-, -, end``: a micro-batch of ``ends`` always follows another one of its step.

    Args:
        begins: the first micro-batches.
        ends: the micro-batches that end the steps after those.
    """
    opening: list[Counts | None] = [*begins, *[None] * (-len(begins) % in_step)]
    for start in range(0, len(ends), _num_followers(in_step)):
        end = ends[start : start + _num_followers(in_step)]
        opening += [*[None] * (in_step - len(end)), *end]
    return opening


def sampler_order(population: int, count: int, seed: int) -> Counts:
    """Return ``count`` indices in the order of a random sampler: random permutations, one epoch after another."""
    generator = np.random.default_rng(seed)
    epochs = [generator.permutation(population) for _ in range(-(-count // population))]
    return np.concatenate(epochs)[:count]


def _draw_micro_batches(population: int, rows: int, count: int, seed: int, *, blocks: bool) -> Counts:
    """Return the rows of ``count`` micro-batches in random order; shape (count, rows).

    Args:
        blocks: whether micro-batches are blocks of successive rows. A last block with fewer rows is left out.
    """
    if not blocks:
        return sampler_order(population, count * rows, seed).reshape(-1, rows)
    whole = max(1, population // rows)
    return np.asarray(block_rows(population, rows)[sampler_order(whole, count, seed)])


def _stratified(sizes: RowSizes, rows: int, count: int, strata: int, collation: Collation, seed: int) -> Counts:
    """Return at least ``count`` micro-batches in rounds, each with one micro-batch from every stratum by size."""
    generator = np.random.default_rng(seed)
    rounds = -(-count // strata)
    count_drawn = rounds * strata * _DRAWS_PER_KEPT
    draws = _draw_micro_batches(len(sizes.tokens), rows, count_drawn, seed, blocks=collation.blocks)
    kept = []
    for micro_batches in draws.reshape(rounds, -1, rows):
        by_size = np.argsort(collation.tokens(sizes, micro_batches), kind="stable").reshape(strata, -1)
        sampled = by_size[np.arange(strata), generator.integers(_DRAWS_PER_KEPT, size=strata)]
        kept.append(micro_batches[generator.permutation(sampled)])
    return np.concatenate(kept)[:count]


def _with_rehearsals(count: int, in_step: int, start: int) -> tuple[Counts, Flags]:
    """Repeat each step from micro-batch ``start`` on; return the indices of micro-batches and a mask of untimed ones.

    Untimed are the first run of each repeated step, and all micro-batches before ``start``.
    """
    steps = np.arange(start, count).reshape(-1, 1, in_step).repeat(2, axis=1)
    untimed = np.zeros(steps.shape, dtype=bool)
    untimed[:, 0] = True
    return np.concatenate([np.arange(start), steps.ravel()]), np.concatenate([np.ones(start, bool), untimed.ravel()])


def _count_draws(schedule: Schedule, uses: int) -> Schedule:
    """Return a schedule that counts draws of rows instead of micro-batches."""
    return replace(
        schedule,
        warmup_micro_batches=-(-schedule.warmup_micro_batches // uses),
        min_micro_batches=-(-schedule.min_micro_batches // uses),
        max_micro_batches=-(-schedule.max_micro_batches // uses),
    )


def _at_max_generation(sizes: RowSizes) -> RowSizes:
    """Return the sizes of rows with completions of the maximum length."""
    if sizes.generated is None:
        return sizes
    return replace(sizes, generated=np.full_like(sizes.generated, sizes.max_generated))


def _num_followers(in_step: int) -> int:
    """Return the number of micro-batches of a step after its first one; 1 for a step of a single micro-batch."""
    return max(1, in_step - 1)
