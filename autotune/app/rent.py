"""The use case of ``autotune plan --gpu all`` and ``--num-processes auto``: plans for many GPUs, sharing traces."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autotune.app.arguments import AUTO, RentArguments, names
from autotune.app.epoch import epoch_of
from autotune.app.notes import close_calls, notes_on_plans, notes_on_processes, notes_on_workload
from autotune.app.offload import OFFLOADED, with_last_resorts_if_nothing_fits
from autotune.app.options import Options, plan_options
from autotune.app.planned import check_network, is_cpu, planned_machine, planned_sources, planned_traces
from autotune.app.problem import global_batch_of, problem_of
from autotune.app.public import signature_from
from autotune.app.tracking import Tracking
from autotune.core.candidate import Candidate
from autotune.core.documents.rent import BILLION, Offer, Rent, Unit, cost_of
from autotune.core.events import Noted, Ranked, StageStarted
from autotune.core.machine import Hardware
from autotune.core.workload import Workload
from autotune.errors import InputError
from autotune.inspection.gpus import compared_gpus, compares_gpus
from autotune.inspection.machine import environment
from autotune.inspection.machine import memory_budget as checked_budget
from autotune.inspection.prices import read_prices
from autotune.planning.evaluator import Evaluator
from autotune.planning.tracing.store import Traces
from autotune.reporting.rent import offer_text
from autotune.techniques.vllm import NAME as VLLM
from autotune.trainers.problem import TrainerProblem
from autotune.units import format_bytes, parse_size, plural

_MAX_TRACED = 40
"""Most candidates for a number of GPUs of one kind; each search starts from the best of the earlier searches."""
NUMBERS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of GPUs tried for ``auto``: within one machine, and whole machines of eight."""
_WORTH = 0.05
"""Least relative gain in throughput per GPU for which more GPUs are planned; at that gain they cost less."""


@signature_from(RentArguments)
def rent(args: RentArguments) -> Rent:
    """Predict for each of several GPUs whether a training fits there, how fast it is, and what it costs.

    For one kind of GPU, numbers of GPUs are compared. A GPU with less memory than the budget uses all of its memory.

    Raises:
        InputError: an argument cannot be used on any of the GPUs.
        AutotuneError: processes cannot be started.
    """
    started, options = time.monotonic(), plan_options(args)
    prices = read_prices(args.prices) if args.prices is not None else None
    sources = planned_sources(args)
    words = compared_gpus(names(args.gpu)) if compares_gpus(args.gpu) else [args.gpu]
    auto = args.num_processes == AUTO
    processes, machines = (1, None) if args.num_processes == AUTO else (args.num_processes, args.num_machines)
    first = planned_machine(words[0], processes, machines)
    # Checked before the rows are tokenised.
    _budget_of(args.memory_budget, first.hardware)
    batch = global_batch_of(options, first)
    numbers = divisible_counts(batch, options, args.num_machines) if auto else [first.hardware.processes]
    planned = [planned_machine(word, numbers[-1], args.num_machines) for word in words]
    check_network(args.network, planned)
    # The ranking of one GPU is not that of the offers.
    tracking = Tracking(lambda event: None if isinstance(event, Ranked) else args.listener(event))
    with planned_traces(args, options, sources, planned, batch, tracking.pass_on) as (workload, traces, _), tracking:
        survey = _Survey(args, options, workload, batch, traces, tracking, prices, numbers, len(words))
        offers = [offer for place, word in enumerate(words, 1) for offer in survey.offers(word, place)]
    if survey.refused and all(offer.estimate is None for offer in offers):
        raise survey.refused[0]
    largest = planned_machine(words[0], max(offer.processes for offer in offers), args.num_machines).hardware
    return Rent(
        model=workload.model.name,
        dataset=workload.dataset.name,
        trainer=options.trainer.name,
        unit=survey.unit,
        global_batch_size=batch,
        num_processes=AUTO if auto else first.hardware.processes,
        num_machines=largest.machines,
        priced=prices is not None,
        offers=tuple(sorted(offers, key=_order)) if len(words) > 1 else tuple(offers),
        notes=tuple(_notes(survey, offers, largest)),
        trace_count=traces.count,
        new_trace_count=traces.new_count,
        wall_seconds=time.monotonic() - started,
        settings=args.settings,
        environment=environment(planned[0]),
    )


@dataclass
class _Survey:
    """Plans for one GPU after another.

    Attributes:
        prices: price of an hour of one GPU, by the catalogue's name; None without prices.
        numbers: numbers of GPUs to try, of each of so many kinds.
        refused: errors of GPUs that could not be planned for.
        offloads: offers of single GPUs on which only last resorts fit.
    """

    arguments: RentArguments
    options: Options
    workload: Workload
    batch: int
    traces: Traces
    tracking: Tracking
    prices: Mapping[str, float] | None
    numbers: Sequence[int]
    kinds: int
    refused: list[InputError] = field(default_factory=list)
    offloads: list[Offer] = field(default_factory=list)
    evaluators: list[Evaluator] = field(default_factory=list)
    _bests: dict[Candidate, None] = field(default_factory=dict)

    def offers(self, word: str | int | None, place: int) -> Sequence[Offer]:
        """Return the offers to show of a kind of GPU, the ``place``-th of all; if none fits, one GPU may offload."""
        alone, tried, earlier = self.kinds == 1, list[Offer](), len(self.evaluators)
        progress = "" if alone else f" ({place} of {self.kinds})"
        for number in self.numbers:
            tried.append(self._reported(self._offer(word, number, progress)))
            tried = self._with_best_of_last(tried, self.evaluators[earlier:])
            if not should_try_more_gpus(tried):
                break
        single = [each for each in self.evaluators[earlier:] if each.problem.setting.machine.hardware.processes == 1]
        if single and not any(offer.fits for offer in tried):
            resorts = with_last_resorts_if_nothing_fits(single[0])
            # Pinned host memory grows in powers of two, so it does not follow from few layers.
            resorts.trace_full_depth([each.candidate for each in resorts.ranked()[:1] if each.fits], varied=False)
            tried[0] = self._best(Offer(tried[0].gpu, 1), resorts)
            self.offloads += [self._reported(tried[0])] if tried[0].fits else []
        return offers_to_show(tried, alone=alone)

    def _with_best_of_last(self, tried: list[Offer], evaluators: Sequence[Evaluator]) -> list[Offer]:
        """Return the offers of a kind of GPU after the last number's best candidate was traced on fewer GPUs too.

        Its search began from theirs, so it found faster candidates, and not only by its number of GPUs.

        Args:
            evaluators: of these offers, without those that could not be planned.
        """
        *fewer, last = tried
        if not last.fits or (last.rate_of_each or 0.0) <= max((each.rate_of_each or 0.0 for each in fewer), default=0):
            return tried
        improved = {offer.processes: offer for offer in tried}
        for evaluator in evaluators[:-1]:
            problem = evaluator.problem
            number = problem.setting.machine.hardware.processes
            other = nearest(problem, evaluators[-1].ranked()[0].candidate)
            if problem.illegal(other) is None and other not in evaluator.candidates:
                evaluator.run([other])
                found = self._best(Offer(improved[number].gpu, number), evaluator)
                improved[number] = found if found == improved[number] else self._reported(found)
        return list(improved.values())

    @property
    def unit(self) -> Unit:
        """The unit of times and costs."""
        return "epoch" if self.arguments.dataset is not None else "billion tokens"

    def _reported(self, offer: Offer) -> Offer:
        """Report an offer to the listener, since an interruption loses the table, and return it."""
        self.arguments.listener(Noted(f"{offer_text(offer, self.unit)}."))
        return offer

    def _offer(self, word: str | int | None, processes: int, progress: str) -> Offer:
        """Return the offer for a number of GPUs."""
        planned = planned_machine(word, processes, self.arguments.num_machines, self.arguments.network)
        blank = Offer(planned.device, processes)
        self.arguments.listener(StageStarted(f"Planning for {blank.gpus}{progress}"))
        try:
            problem = problem_of(self.options, self.workload, planned, self.batch)
            budget_bytes = _budget_of(self.arguments.memory_budget, planned.hardware)
        except InputError as error:
            self.refused.append(error)
            return replace(blank, reason=error.message)
        evaluator = Evaluator(problem, planned.gpu, budget_bytes, self.traces)
        starts = (*problem.recipes, *(nearest(problem, best) for best in self._bests))
        self.tracking.search(evaluator, starts, _MAX_TRACED)
        self.evaluators.append(evaluator)
        self._bests.update(dict.fromkeys(found.candidate for found in evaluator.ranked()[:1]))
        return self._best(blank, evaluator)

    def _best(self, blank: Offer, evaluator: Evaluator) -> Offer:
        """Return the offer of a number of GPUs with their best traced candidate."""
        problem = evaluator.problem
        best = next(iter(evaluator.ranked()), None)
        if best is None or best.memory is None:
            return replace(blank, estimate=evaluator.estimate(problem.baseline), reason=evaluator.unknown_reason)
        offer = replace(blank, estimate=best, differences=best.candidate.differences(problem.baseline))
        if not best.fits:
            needs, budget = format_bytes(best.memory.device_bytes), format_bytes(evaluator.budget_bytes)
            return replace(offer, reason=f"the least needs {needs} of {budget}")
        rate, price = best.tokens_per_second, (self.prices or {}).get(offer.gpu.name)
        seconds = epoch_of(best.candidate, problem, rate).seconds_per_epoch
        if self.arguments.dataset is None:
            seconds = BILLION / rate if rate else None
        cost = cost_of(seconds, price, offer.processes)
        return replace(offer, tokens_per_second=rate, seconds=seconds, price=price, cost=cost)


def nearest(problem: TrainerProblem, candidate: Candidate) -> Candidate:
    """Return a candidate of another number or kind of GPUs with the baseline's choices where a problem lacks its own.

    A single process, for example, has nothing to shard.
    """
    choices = {knob: choice for knob, choice in candidate.items() if choice in problem.choices.get(knob, ())}
    return problem.normal(problem.baseline.but(**choices))


def divisible_counts(batch: int, options: Options, machines: int | None) -> Sequence[int]:
    """Return the numbers of GPUs that divide a global batch and, if given, are multiples of a number of machines.

    Raises:
        InputError: there is none.
    """
    shared = options.ranks_per_row
    found = [number for number in NUMBERS if number % shared == 0 and batch % (number // shared) == 0]
    found = [number for number in found if machines is None or (machines > 0 and number % machines == 0)]
    if found:
        return found
    among = "" if machines is None else f" in {machines} machines"
    raise InputError(
        f"A global batch of {batch} {options.trainer.document_noun} cannot be divided among any number of GPUs"
        f" tried{among}.",
        hint=f"Give another --global-batch-size or --num-machines; tried are {', '.join(map(str, NUMBERS))} GPUs.",
    )


def should_try_more_gpus(tried: Sequence[Offer]) -> bool:
    """Return whether to plan for the next larger number of GPUs of a kind.

    Larger numbers are tried until something fits, and then as long as throughput per GPU is known and rises: only slow
    candidates may fit on the fewest GPUs.
    """
    fitting = [offer for offer in tried if offer.fits]
    if not fitting:
        return True
    *fewer, last = (offer.rate_of_each for offer in fitting)
    if not fewer or last is None:
        return fitting[-1].gpu.speeds is not None
    return last > (1 + _WORTH) * max(rate or 0.0 for rate in fewer)


def offers_to_show(tried: Sequence[Offer], *, alone: bool) -> Sequence[Offer]:
    """Return the offers that a table shows of the planned numbers of GPUs.

    These are all of the only kind; of several, the fewest GPUs that fit, and the number with the highest throughput per
    GPU if that is higher; if none fits, the largest number.
    """
    fitting = [offer for offer in tried if offer.fits]
    if alone or not fitting:
        return tried if alone else tried[-1:]
    fewest, best = fitting[0], max(fitting, key=lambda offer: offer.rate_of_each or 0.0)
    least = (1 + _WORTH) * (fewest.rate_of_each or 0.0)
    return [fewest, best] if (best.rate_of_each or 0.0) > least else [fewest]


def _budget_of(requested: str | int | None, hardware: Hardware) -> int:
    """Return the requested budget, or all memory of a GPU that has less."""
    return checked_budget(requested and min(parse_size(requested), hardware.memory_bytes), hardware)


def _order(offer: Offer) -> tuple[object, ...]:
    missing = offer.cost is None, offer.seconds is None
    need = offer.estimate.spare_bytes if offer.estimate is not None and offer.estimate.spare_bytes is not None else 0
    return not offer.fits, *missing, offer.cost or 0.0, offer.seconds or 0.0, -need


def _notes(survey: _Survey, offers: Sequence[Offer], largest: Hardware) -> Iterator[str]:
    args, batch, prices = survey.arguments, survey.batch, survey.prices
    auto = args.num_processes == AUTO
    yield from notes_on_workload(survey.workload, survey.evaluators[0].problem.setting.machine.packages)
    yield "Nothing was measured."
    if args.dataset is not None:
        varied = "Memory that batches of varied lengths may add is not traced for a table"
        yield f"{varied}: plan for the GPU that you choose, with --gpu NAME."
    if any(len(each.candidates) < each.problem.size for each in survey.evaluators):
        among = f"For each kind and number of GPUs, the best was searched for among at most {_MAX_TRACED} candidates"
        yield f"{among}: others may be faster, and fewer GPUs may be enough."
    most = max(survey.numbers)
    if auto and most < max(NUMBERS):
        yield (
            f"A global batch of {batch} {survey.options.trainer.document_noun} can be divided among at most"
            f" {plural(most, 'GPU')}, of the numbers tried ({', '.join(map(str, NUMBERS))}): --global-batch-size sets"
            " another."
        )
    gpus = {offer.gpu.name: offer.gpu for offer in offers if offer.estimate is not None and not is_cpu(args.gpu)}
    yield from notes_on_processes(largest.processes, largest.machines, args.network, gpus.values(), at_most=auto)
    tight = ", ".join(offer.gpus for offer in offers if offer.fits and not offer.fits_with_error)
    if tight:
        yield (
            f"May not fit, since less is to spare than the error of the estimate: {tight}. The plan for one of them"
            " (--gpu NAME) names the fastest that has more to spare."
        )
    vllm = {choice for each in survey.evaluators for choice in each.problem.choices.get(VLLM, ())}
    yield from notes_on_plans(survey.workload, vllm, gpus.values(), survey.traces)
    yield from close_calls(offers)
    unpriced = [offer.gpu.name for offer in offers if prices is not None and offer.gpu.name not in prices]
    if unpriced:
        yield f"Without a price: {', '.join(dict.fromkeys(unpriced))}."
    memories = {offer.gpu.name: offer.estimate.memory for offer in survey.offloads if offer.estimate is not None}
    needs = [f"{name} ({format_bytes(need.machine_bytes)})" for name, need in memories.items() if need is not None]
    if needs:
        yield f"{OFFLOADED} This holds for these GPUs, with the host memory that they need: {', '.join(needs)}."
