"""Estimates candidates from traces at their own micro-batch sizes, and explains the stages of an estimate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autotune.core.candidate import Candidate
from autotune.core.documents.estimate import Estimate, Origin, distinct, rank_key
from autotune.core.documents.explanation import Explanation, PartPeak, PartTime, Subject, TracedPoint
from autotune.core.documents.memory_timeline import OUTSIDE_TENSORS, VLLM, Mark, MemoryTimeline
from autotune.core.gpu import Gpu
from autotune.core.jobs.traced import TraceReply
from autotune.planning.extrapolation.forecast import Levels
from autotune.planning.single import PlanTracer, SizedPlan, TracedPlan
from autotune.planning.tracing.store import Traces
from autotune.planning.vllm import engine_of, with_vllm
from autotune.probing.tracing import Untraceable
from autotune.trainers.evaluation import whole_geometry
from autotune.trainers.problem import TrainerProblem

_NOT_TRACED = Untraceable("it was not traced", lasting=False)


class Evaluator:
    """Runner that estimates candidates of one problem by traces (:class:`autotune.core.documents.estimate.Runner`).

    Candidates are in their normal form, and need not be in the problem's space. Only depth is extrapolated. Candidates
    with equal training plans share a trace. The largest micro-batches are traced first. Typical ones, which give the
    time, are traced only for the baseline and for candidates that may fit; other candidates have no speed, unless all
    of their micro-batches are nearly as large. If steps have no predicted time, only the largest are traced.

    Args:
        device: see :class:`autotune.planning.single.PlanTracer`.
        budget_bytes: memory limit of the training.
    """

    def __init__(self, problem: TrainerProblem, device: Gpu | None, budget_bytes: int, traces: Traces) -> None:
        self.problem = problem
        self.device = device
        self.budget_bytes = budget_bytes
        self.traces = traces
        self._plans: dict[Candidate, TracedPlan | Untraceable] = {}
        self._full_depth: set[Candidate] = set()
        self._tracer = PlanTracer(traces, problem.setting, device)

    def run(self, candidates: Sequence[Candidate]) -> list[Estimate]:
        """Return the estimates of candidates, in their order; missing traces are run together.

        Raises:
            AutotuneError: traces cannot be run.
        """
        trainer, setting = self.problem.trainer, self.problem.setting
        plans = {each: trainer.plan(each, setting) for each in candidates if self._may_be_traced(each)}
        sized = {each: SizedPlan(plan, whole_geometry(trainer, plan, setting.workload)) for each, plan in plans.items()}
        self._plans.update(zip(sized, self._tracer.traced([*sized.values()], timed=False), strict=True))
        timed = {each: plan for each, plan in sized.items() if self._is_worth_timing(each)}
        self._plans.update(zip(timed, self._tracer.traced([*timed.values()], timed=True), strict=True))
        return [self.estimate(candidate) for candidate in candidates]

    def _may_be_traced(self, candidate: Candidate) -> bool:
        """Whether a candidate has no result, or a repeated trace may succeed."""
        found = self.traced_plan(candidate)
        return isinstance(found, Untraceable) and not found.lasting

    def _is_worth_timing(self, candidate: Candidate) -> bool:
        traced, estimate = self.traced_plan(candidate), self.estimate(candidate)
        if isinstance(traced, Untraceable) or traced.timed or traced.memory.step_seconds is None:
            return False
        return estimate.may_fit or (estimate.memory is not None and candidate == self.problem.baseline)

    def for_problem(self, problem: TrainerProblem, candidates: Sequence[Candidate] | None = None) -> Evaluator:
        """Return an evaluator of another problem, with candidates evaluated from few layers; None: the same ones."""
        evaluator = Evaluator(problem, self.device, self.budget_bytes, self.traces)
        evaluator.run([*self._plans] if candidates is None else candidates)
        return evaluator

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """The legal candidates that were evaluated, in order."""
        return tuple(candidate for candidate in self._plans if self.problem.illegal(candidate) is None)

    @property
    def traced_plans(self) -> Sequence[TracedPlan]:
        """The training plans that were traced."""
        return [each for each in self._plans.values() if isinstance(each, TracedPlan)]

    @property
    def untraceable(self) -> Mapping[Candidate, str]:
        """The candidates without a trace, each with the violated rule or the failure."""
        failed = {candidate: found for candidate, found in self._plans.items() if isinstance(found, Untraceable)}
        return {candidate: self.problem.illegal(candidate) or found.reason for candidate, found in failed.items()}

    @property
    def unknown_reason(self) -> str:
        """The reason that no candidate has an estimate: the baseline's, or else another candidate's."""
        estimates = (self.estimate(self.problem.baseline), *self.ranked())
        return next((each.reason for each in estimates if each.reason), "nothing could be predicted")

    def ranked(self) -> list[Estimate]:
        """Return the estimates of :attr:`candidates`, by :func:`autotune.core.documents.estimate.rank_key`."""
        return sorted(map(self.estimate, self.candidates), key=rank_key)

    def estimate(self, candidate: Candidate) -> Estimate:
        """Return the estimate of a candidate, including vLLM's memory; unknown if it was not evaluated."""
        traced = self.traced_plan(candidate)
        if isinstance(traced, Untraceable):
            return Estimate(candidate, Origin.UNKNOWN, reason=traced.reason)
        memory = with_vllm(traced.memory, traced.plan, self.problem.setting)
        if isinstance(memory, str):
            return Estimate(candidate, Origin.UNKNOWN, reason=memory)
        memory = memory.within(self.budget_bytes)
        tokens = traced.geometry.tokens_per_step
        scaled_seconds = traced.scaled_seconds if memory.step_seconds and not traced.timed else None
        if not traced.timed:
            memory = replace(memory, step_seconds=None)
        return Estimate(
            candidate,
            Origin.TRACED,
            memory,
            tokens / memory.step_seconds if memory.step_seconds else None,
            self.budget_bytes - memory.device_bytes,
            scaled_tokens_per_second=tokens / scaled_seconds if scaled_seconds else None,
        )

    def traced_plan(self, candidate: Candidate) -> TracedPlan | Untraceable:
        """Return the traced plan of a candidate, or why there is none."""
        return self._plans.get(candidate, _NOT_TRACED)

    def confirm_at_full_depth(self, count: int) -> None:
        """Trace the first ``count`` distinct candidates and the baseline at full depth, if they may fit.

        Repeats until the first ones have full-depth traces. Then traces the best one with micro-batches of varied
        lengths.
        """
        while missing := [
            each.candidate
            for each in (*distinct(self.ranked(), count), self.estimate(self.problem.baseline))
            if each.may_fit and each.candidate not in self._full_depth
        ]:
            self.trace_full_depth(missing, varied=False)
        best = next(iter(self.ranked()), None)
        if best is not None and best.fits:
            self.trace_full_depth([best.candidate])

    def trace_full_depth(self, candidates: Sequence[Candidate], *, varied: bool = True) -> None:
        """Trace candidates at full depth; later estimates use these traces.

        Args:
            varied: whether to also trace micro-batches of varied lengths, if lengths vary.
        """
        found = {candidate: self.traced_plan(candidate) for candidate in candidates}
        plans = {candidate: traced for candidate, traced in found.items() if isinstance(traced, TracedPlan)}
        self._plans.update(zip(plans, self._tracer.whole([*plans.values()], varied=varied), strict=True))
        self._full_depth.update(candidates)

    def timeline(self, candidate: Candidate) -> MemoryTimeline | None:
        """Return the memory of a candidate through one step, thinned; None if it was not traced."""
        traced, memory = self.traced_plan(candidate), self.estimate(candidate).memory
        if isinstance(traced, Untraceable) or memory is None:
            return None
        engine = engine_of(traced.plan, self.problem.setting)
        tensors = {name: size for name, size in traced.memory.breakdown.items() if name not in OUTSIDE_TENSORS}
        at_peak = {**tensors, VLLM: 0}
        moments: list[Levels] = []
        marks: list[Mark] = []
        for (part, backward), stretch in traced.worst.stretches.items():
            marks.append(Mark(part, backward, len(moments)))
            engine_bytes = engine.used_bytes(part.phase) if engine is not None else 0
            of_engine = {VLLM: engine_bytes} if engine_bytes else {}
            moments += [{**levels, **of_engine} for levels in stretch.course()]
        names = list(dict.fromkeys(name for levels in moments for name in levels))
        totals = [sum(levels.values()) for levels in moments]
        return MemoryTimeline(
            marks=tuple(marks),
            levels={name: tuple([levels.get(name, 0) for levels in moments]) for name in names},
            # Of equal totals, the moment of the breakdown.
            peak=max(range(len(moments)), key=lambda at: (totals[at], at_peak == {**moments[at], VLLM: 0})),
            breakdown=memory.breakdown,
            error=memory.error,
            followed=traced.aligned,
            micro_batches=traced.geometry.micro_batches,
        ).thinned()


def explain(evaluator: Evaluator, candidate: Candidate, subject: Subject) -> Explanation:
    """Return the stages of an evaluated candidate's estimate."""
    problem, traced = evaluator.problem, evaluator.traced_plan(candidate)
    setting = problem.setting
    plan = problem.trainer.plan(candidate, setting)
    documents = setting.workload.dataset.documents
    explanation = Explanation(
        subject=subject,
        candidate=candidate,
        training_plan=plan,
        documents=documents.rows,
        document_tokens=documents.tokens,
        longest_tokens=documents.longest,
        geometry=whole_geometry(problem.trainer, plan, setting.workload),
        layers=len(setting.workload.model.layer_kinds),
    )
    if isinstance(traced, Untraceable):
        return explanation
    highest = {at: aligned.highest for at, aligned in traced.worst.stretches.items()}
    return replace(
        explanation,
        geometry=traced.geometry,
        traces=tuple(_traced_point(traced, *each) for each in traced.fit.weighted()),
        aligned=traced.fit.aligned,
        peaks=tuple(PartPeak(*at, levels, name) for at, (name, levels) in highest.items() if levels),
        times=tuple(
            PartTime(part, time.seconds, repeats)
            for part, time in traced.mean.times.items()
            if (repeats := traced.mean.repeats(part, traced.geometry.micro_batches))
        ),
    )


def _traced_point(traced: TracedPlan, layers: int, reply: TraceReply, weight: float) -> TracedPoint:
    replayed = reply.replayed(traced.plan.expandable_segments)
    return TracedPoint(
        layers=layers,
        shape=traced.geometry.worst,
        weight=weight,
        tensor_bytes=reply.device.bytes,
        allocated_bytes=replayed.allocated_bytes,
        reserved_bytes=replayed.reserved_bytes,
        assumptions=reply.assumptions,
    )
