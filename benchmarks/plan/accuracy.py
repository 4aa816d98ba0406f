"""Planned estimates of Llama-3.1-8B's shape, compared with traces of all its layers.

Run ``python -m benchmarks.plan.accuracy [--samples 30] [--allow lora,quantization] [--num-processes 2] [--tokens
1024]``: it draws candidates of the space by chance, no two of which train in the same way, plans each, traces each of
them whole, and prints a Markdown table. No GPU is needed, and none is compared with: this is what following few layers
costs.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from autotune.app.arguments import SearchArguments
from autotune.app.options import checked_options
from autotune.app.planned import planned_machine, planned_workload, rows_of_length
from autotune.app.problem import global_batch_of, problem_of
from autotune.app.requests import traces_of
from autotune.core.candidate import Candidate
from autotune.core.documents.estimate import Estimate
from autotune.core.events import ignore
from autotune.core.jobs.traced import TraceReply, TraceRequest
from autotune.core.plan import TrainingPlan
from autotune.core.step_time import StepTime
from autotune.errors import AutotuneError
from autotune.inspection.model import model_source
from autotune.planning.evaluator import Evaluator
from autotune.planning.extrapolation.fit import Fit
from autotune.planning.extrapolation.forecast import mixed_times
from autotune.planning.tracing.cache import Cache
from autotune.probing import trace
from autotune.probing.tracing import ServerTracer
from autotune.techniques.traits import without_sizes
from autotune.trainers.problem import TrainerProblem
from autotune.units import format_bytes
from benchmarks.shapes import LLAMA_8B, write_model

_SEED = 5


@dataclass(frozen=True)
class Compared:
    """A candidate as it was planned and as it was traced whole."""

    plan: TrainingPlan
    estimate: Estimate
    whole: TraceReply

    @property
    def reserved_error(self) -> float:
        """Relative error of the planned reserved memory."""
        memory = self.estimate.memory
        return (memory.reserved_bytes or 0) / (self.whole_bytes or 1) - 1 if memory is not None else 0.0

    @property
    def whole_bytes(self) -> int:
        """Reserved memory by the whole trace."""
        return self.whole.replayed().reserved_bytes or 0

    @property
    def time_error(self) -> float | None:
        """Share by which the planned time of a step is off; None: a plan does not time what cannot fit."""
        memory, step = self.estimate.memory, whole_step(self.plan, self.whole)
        if memory is None or memory.step_seconds is None or step is None:
            return None
        return memory.step_seconds / step.seconds - 1


def whole_step(plan: TrainingPlan, whole: TraceReply) -> StepTime | None:
    """Return the time of an optimizer step by a trace of all layers; None where speeds are not known."""
    forecast = Fit({1: whole}, 1).forecast(plan.micro_batches)
    terms = [(time, float(forecast.repeats(part, plan.micro_batches))) for part, time in forecast.times.items()]
    return mixed_times(terms) if terms else None


def main() -> None:
    """Plan, trace, compare and print."""
    parser = argparse.ArgumentParser(description="Accuracy of planning.")
    parser.add_argument("--gpu", default="H100-80GB")
    parser.add_argument("--samples", type=int, default=30)
    parser.add_argument("--allow", default="", help="techniques that change training, separated by commas")
    parser.add_argument("--num-processes", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of every row")
    asked = parser.parse_args()
    print("| need | off by | time off by | stated | choices |")
    print("|--:|--:|--:|--:|---|", flush=True)
    found: list[Compared] = []
    with tempfile.TemporaryDirectory() as folder:
        for problem, compared in _compared(Path(folder), asked):
            found.append(compared)
            print(_line(problem, compared), flush=True)
    timed = [item.time_error for item in found if item.time_error is not None]
    print(f"\n{len(found)}; {_summary('memory', [item.reserved_error for item in found])}; "
          f"{len(timed)} timed; {_summary('time', timed)}")  # fmt: skip


def _compared(folder: Path, asked: argparse.Namespace) -> Iterator[tuple[TrainerProblem, Compared]]:
    source = model_source(str(write_model(folder / "model", LLAMA_8B)), "random")
    planned, allow = planned_machine(asked.gpu, asked.num_processes), tuple(filter(None, asked.allow.split(",")))
    options = checked_options(
        SearchArguments(trainer="sft", max_length=asked.tokens, allow=allow, num_processes=asked.num_processes)
    )
    batch = global_batch_of(options, planned)
    with ServerTracer(planned.hardware.cores, ignore) as tracer:
        cache = Cache(folder / "cache")
        workload = planned_workload(options, source, None, tracer, cache, ignore)
        problem = problem_of(options, rows_of_length(workload, asked.tokens, batch), planned, batch)
        traces = traces_of(workload, planned, tracer, cache)
        evaluator = Evaluator(problem, planned.gpu, planned.hardware.memory_bytes, traces)
        drawn = list(_drawn(problem, asked.samples))
        for candidate, estimate in zip(drawn, evaluator.run(drawn), strict=True):
            rows = ((asked.tokens,),) * int(candidate["per_device_train_batch_size"])
            plan = problem.trainer.plan(candidate, problem.setting)
            request = TraceRequest(plan, source, "cuda", rows, gpu=planned.gpu)
            try:
                yield problem, Compared(plan, estimate, trace(tracer.server, request, folder / "job"))
            except AutotuneError as error:
                print(f"| {error.message} |")


def _drawn(problem: TrainerProblem, samples: int) -> Iterator[Candidate]:
    seen = set[str]()
    chance = random.Random(_SEED)
    while len(seen) < samples:
        chosen = {knob: chance.choice(choices) for knob, choices in problem.choices.items()}
        candidate = problem.normal(Candidate(chosen))
        way = repr(without_sizes(problem.trainer.plan(candidate, problem.setting)))
        if way not in seen and problem.illegal(candidate) is None:
            seen.add(way)
            yield candidate


def _line(problem: TrainerProblem, compared: Compared) -> str:
    candidate, memory = compared.estimate.candidate, compared.estimate.memory
    differs = candidate.differences(problem.baseline)
    choices = ", ".join(f"{knob}={candidate[knob]}" for knob in candidate if knob in differs) or "TRL's defaults"
    stated = f"{memory.error:.0%}" if memory is not None else "unknown"
    time = f"{compared.time_error:+.1%}" if compared.time_error is not None else "not timed"
    return f"| {format_bytes(compared.whole_bytes)} | {compared.reserved_error:+.1%} | {time} | {stated} | {choices} |"


def _summary(what: str, errors: Sequence[float]) -> str:
    sizes = [abs(error) for error in errors]
    return f"{what} off by {median(sizes):.1%} in the median and {max(sizes):.1%} at the worst"


if __name__ == "__main__":
    main()
