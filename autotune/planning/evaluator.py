"""Estimates candidates from traces at their own micro-batch sizes, and explains the stages of an estimate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autotune.core.candidate import Candidate
from autotune.core.estimate import Estimate, MemoryEstimate, Origin, distinct, rank_key
from autotune.core.explanation import Explanation, PartPeak, PartTime, Subject, TracedPoint
from autotune.core.gpu import Gpu
from autotune.core.memory_timeline import OUTSIDE_TENSORS, VLLM, Mark, MemoryTimeline
from autotune.core.setting import Setting
from autotune.core.traced import TraceReply
from autotune.planning.extrapolation.series import Levels
from autotune.planning.single import PlanTracer, SizedPlan, TracedPlan
from autotune.planning.tracing.store import Traces
from autotune.planning.vllm import Engine, engine_of, with_vllm
from autotune.probing.tracing import Untraceable
from autotune.trainers.evaluation import whole_geometry
from autotune.trainers.problem import TrainerProblem


class Evaluator:
    """Runner that estimates candidates of one problem by traces (:class:`autotune.core.estimate.Runner`).

    Candidates are in their normal form, and need not be in the problem's space. Only depth is extrapolated. Candidates
    with equal training plans share a trace. The largest micro-batches are traced first. Typical ones, which give the
    time, are traced only for the baseline and for candidates that may fit; other candidates have no speed, unless all
    of their micro-batches are nearly as large. If steps have no predicted time, only the largest are traced.
    """

    def __init__(self, problem: TrainerProblem, device: Gpu | None, budget_bytes: int, traces: Traces) -> None:
        self.problem = problem
        self.device = device
        self.budget_bytes = budget_bytes
        self.traces = traces
        # Results by fingerprint of the training plan, and the fingerprint of each candidate's plan.
        self._plans: dict[str, TracedPlan | Untraceable] = {}
        self._fingerprints: dict[Candidate, str] = {}
        self._full_depth: set[Candidate] = set()
        self._tracer = PlanTracer(traces, problem.setting, device)

    def run(self, candidates: Sequence[Candidate]) -> list[Estimate]:
        """Return the estimates of candidates, in their order; missing traces are run together.

        Raises:
            AutotuneError: traces cannot be run.
        """
        setting = self.problem.setting
        missing = [each for each in dict.fromkeys(candidates) if self._is_missing(self._fingerprints.get(each, ""))]
        plans = {candidate: self.problem.trainer.plan(candidate, setting) for candidate in missing}
        representatives = {plan.fingerprint: candidate for candidate, plan in reversed(plans.items())}
        new = {name: candidate for name, candidate in representatives.items() if self._is_missing(name)}
        trainer, workload = self.problem.trainer, setting.workload
        geometries = {name: whole_geometry(trainer, plans[each], workload) for name, each in new.items()}
        sized = {name: SizedPlan(plans[each], geometries[name]) for name, each in new.items()}
        self._trace(sized, timed=False)
        self._fingerprints.update({candidate: plan.fingerprint for candidate, plan in plans.items()})
        self._trace({name: each for name, each in sized.items() if self._is_worth_timing(new[name])}, timed=True)
        return [self.estimate(candidate) for candidate in candidates]

    def _is_missing(self, name: str) -> bool:
        """Whether a training plan has no result, or a repeated trace may succeed."""
        traced = self._plans.get(name)
        return traced is None or (isinstance(traced, Untraceable) and not traced.lasting)

    def _trace(self, sized: Mapping[str, SizedPlan], *, timed: bool) -> None:
        self._plans.update(zip(sized, self._tracer.traced([*sized.values()], timed=timed), strict=True))

    def _is_worth_timing(self, candidate: Candidate) -> bool:
        traced, estimate = self.traced_plan(candidate), self.estimate(candidate)
        if traced is None or traced.timed or traced.memory.step_seconds is None or estimate.memory is None:
            return False
        return estimate.may_fit or candidate == self.problem.baseline

    def for_problem(self, problem: TrainerProblem) -> Evaluator:
        """Return an evaluator of another problem of the same workload, with the same candidates evaluated."""
        evaluator = Evaluator(problem, self.device, self.budget_bytes, self.traces)
        evaluator.run([*self._fingerprints])
        return evaluator

    def estimate_in_setting(self, candidate: Candidate, setting: Setting) -> Estimate:
        """Return the estimate of a candidate in another setting, extrapolated from few layers."""
        problem = replace(self.problem, setting=setting)
        return Evaluator(problem, self.device, self.budget_bytes, self.traces).run([candidate])[0]

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """The legal candidates that were evaluated, in order."""
        return tuple(candidate for candidate in self._fingerprints if self.problem.illegal(candidate) is None)

    @property
    def traced_plans(self) -> Sequence[TracedPlan]:
        """The training plans that were traced."""
        return [each for each in self._plans.values() if isinstance(each, TracedPlan)]

    @property
    def untraceable(self) -> Mapping[Candidate, str]:
        """The candidates without a trace, each with the violated rule or the failure."""
        results = ((candidate, self._plans[name]) for candidate, name in self._fingerprints.items())
        failed = {candidate: found.reason for candidate, found in results if isinstance(found, Untraceable)}
        return {candidate: self.problem.illegal(candidate) or reason for candidate, reason in failed.items()}

    @property
    def unknown_reason(self) -> str:
        """The reason that no candidate has an estimate: the baseline's, or else another candidate's."""
        estimates = (self.estimate(self.problem.baseline), *self.ranked())
        return next((each.reason for each in estimates if each.reason), "nothing could be predicted")

    def ranked(self) -> list[Estimate]:
        """Return the estimates of :attr:`candidates`, in the order of :func:`autotune.core.estimate.rank_key`."""
        return sorted(map(self.estimate, self.candidates), key=rank_key)

    def estimate(self, candidate: Candidate) -> Estimate:
        """Return the estimate of a candidate, including vLLM's memory; unknown if it was not evaluated."""
        if candidate not in self._fingerprints:
            return Estimate(candidate, Origin.UNKNOWN, reason="it was not traced")
        traced = self._plans[self._fingerprints[candidate]]
        if isinstance(traced, Untraceable):
            return Estimate(candidate, Origin.UNKNOWN, reason=traced.reason)
        memory = with_vllm(traced.memory, traced.plan, self.problem.setting)
        if isinstance(memory, str):
            return Estimate(candidate, Origin.UNKNOWN, reason=memory)
        memory = memory.within(self.budget_bytes)
        tokens = traced.geometry.tokens_per_step
        scaled_seconds = traced.scaled_seconds if memory.step_seconds else None
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

    def traced_plan(self, candidate: Candidate) -> TracedPlan | None:
        """Return the traced plan of a candidate, or None."""
        traced = self._plans.get(self._fingerprints.get(candidate, ""))
        return traced if isinstance(traced, TracedPlan) else None

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
        """Trace candidates at full depth; later estimates use these traces. For ``varied`` see `PlanTracer.whole`."""
        traces = {self._fingerprints.get(candidate, ""): self.traced_plan(candidate) for candidate in candidates}
        plans = {name: traced for name, traced in traces.items() if traced is not None}
        self._plans.update(zip(plans, self._tracer.whole([*plans.values()], varied=varied), strict=True))
        self._full_depth.update(candidates)

    def timeline(self, candidate: Candidate) -> MemoryTimeline | None:
        """Return the memory of a candidate through one step; None if it was not traced."""
        traced, estimate = self.traced_plan(candidate), self.estimate(candidate)
        if traced is None or estimate.memory is None:
            return None
        return memory_timeline(traced, estimate.memory, engine_of(traced.plan, self.problem.setting))


def memory_timeline(traced: TracedPlan, memory: MemoryEstimate, engine: Engine | None) -> MemoryTimeline:
    """Return the memory timeline of a step, thinned; ``memory`` is the plan's estimate, including its engine."""
    at_peak = {name: size for name, size in traced.memory.breakdown.items() if name not in OUTSIDE_TENSORS}
    moments: list[Levels] = []
    marks: list[Mark] = []
    are_peak: list[bool] = []
    for (part, backward), stretch in traced.stretches.items():
        course = stretch.course()
        marks.append(Mark(part, backward, len(moments)))
        engine_bytes = engine.held_bytes(part.phase) if engine is not None else 0
        of_engine = {VLLM: engine_bytes} if engine_bytes else {}
        moments += [{**levels, **of_engine} for levels in course]
        are_peak += [levels == at_peak for levels in course]
    names = list(dict.fromkeys(name for levels in moments for name in levels))
    totals = [sum(levels.values()) for levels in moments]
    return MemoryTimeline(
        marks=tuple(marks),
        levels={name: tuple([levels.get(name, 0) for levels in moments]) for name in names},
        # Of equal totals, the moment of the breakdown.
        peak=max(range(len(moments)), key=lambda moment: (totals[moment], are_peak[moment])),
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
        geometry=whole_geometry(problem.trainer, plan, setting.workload) if traced is None else traced.geometry,
        layers=len(setting.workload.model.layer_kinds),
    )
    if traced is None:
        return explanation
    highest = {at: aligned.highest() for at, aligned in traced.stretches.items()}
    return replace(
        explanation,
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
