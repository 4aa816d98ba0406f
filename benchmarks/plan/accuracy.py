"""Planned estimates of a published model's shape, compared with traces of all its layers.

Run ``python -m benchmarks.plan.accuracy [--trainer dpo] [--model qwen2.5-1.5b] [--allow lora,quantization]
[--num-processes 2] [--tokens 1024] [--samples 30] [--seed 5]``: it draws candidates of the space by chance, no two of
which train in the same way, plans each, traces each of them whole, and prints a Markdown table. With ``--fix
lora=r16,sharding=zero1`` it compares a single one, TRL's default with these choices. No GPU is needed, and none is
compared with: this is what following few layers costs. Candidates that a plan traces whole are not compared.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median

from autotune.app.arguments import SearchArguments, names
from autotune.app.options import checked_options
from autotune.app.planned import planned_machine, planned_workload, rows_of_length
from autotune.app.problem import global_batch_of, problem_of
from autotune.app.requests import traces_of
from autotune.core.candidate import Candidate
from autotune.core.events import ignore
from autotune.inspection.model import model_source
from autotune.planning.evaluator import Evaluator
from autotune.planning.single import TracedPlan
from autotune.planning.tracing.cache import Cache
from autotune.probing.tracing import ServerTracer, Untraceable
from autotune.reporting.words import differences
from autotune.techniques.traits import without_sizes
from autotune.trainers import DEFAULT, trainers
from autotune.trainers.problem import TrainerProblem
from autotune.units import format_bytes
from benchmarks.plan.at_random import at_random
from benchmarks.shapes import CONFIGURATIONS, LLAMA_8B, write_model

_MODELS = {"llama-3.1-8b": LLAMA_8B, **CONFIGURATIONS}


@dataclass(frozen=True)
class Compared:
    """A candidate as it was planned and as it was traced whole."""

    candidate: Candidate
    few: TracedPlan
    whole: TracedPlan

    @property
    def allocated_error(self) -> float:
        """Relative error of the planned peak of allocated memory."""
        return self.few.memory.peak_bytes / self.whole.memory.peak_bytes - 1

    @property
    def reserved_error(self) -> float:
        """Relative error of the planned reserved memory."""
        return (self.few.memory.reserved_bytes or 0) / (self.whole.memory.reserved_bytes or 1) - 1

    @property
    def least_error(self) -> float:
        """Relative error of the planned reserved memory on a device that is short of it."""
        few, whole = ((each.memory.reserved_bytes or 0) - each.memory.returned_bytes for each in (self.few, self.whole))
        return few / whole - 1

    @property
    def time_error(self) -> float | None:
        """Relative error of the planned time of a step with the largest micro-batches; None: unknown speeds."""
        micro_batches = self.few.geometry.micro_batches
        few, whole = self.few.worst.step(micro_batches), self.whole.worst.step(micro_batches)
        return few.seconds / whole.seconds - 1 if few is not None and whole is not None else None


def main() -> None:
    """Plan, trace, compare and print."""
    parser = argparse.ArgumentParser(description="Accuracy of planning.")
    parser.add_argument("--trainer", choices=tuple(trainers()), default=DEFAULT)
    parser.add_argument("--model", choices=tuple(_MODELS), default="llama-3.1-8b", help="also the teacher's shape")
    parser.add_argument("--gpu", default="H100-80GB")
    parser.add_argument("--samples", type=int, default=30)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--allow", default="", help="techniques that change training, separated by commas")
    parser.add_argument("--fix", default="", help="choices of the only candidate, separated by commas")
    parser.add_argument("--num-processes", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of every row")
    asked = parser.parse_args()
    print("| need | allocated | reserved | at least | time | stated | choices |")
    print("|--:|--:|--:|--:|--:|--:|---|", flush=True)
    found: list[Compared] = []
    with tempfile.TemporaryDirectory() as folder:
        for problem, item in _traced(Path(folder), asked):
            found.append(item)
            print(_line(problem, item), flush=True)
    print(f"\n{len(found)} candidates")
    for what in ("allocated", "reserved", "least", "time"):
        errors = [error for each in found if (error := getattr(each, f"{what}_error")) is not None]
        if errors:
            print(_summary(what, errors))


def _traced(folder: Path, asked: argparse.Namespace) -> Iterator[tuple[TrainerProblem, Compared]]:
    source = model_source(str(write_model(folder / "model", _MODELS[asked.model])), "random")
    planned = planned_machine(asked.gpu, asked.num_processes)
    options = checked_options(
        SearchArguments(
            trainer=asked.trainer,
            teacher=str(folder / "model") if asked.trainer == "distillation" else None,
            allow=names(asked.allow),
            fix=dict(choice.split("=") for choice in names(asked.fix)),
            num_processes=asked.num_processes,
        )
    )
    batch = global_batch_of(options, planned)
    with ServerTracer(planned.hardware.cores, ignore) as tracer:
        cache = Cache(folder / "cache")
        workload = planned_workload(options, source, None, tracer, cache, ignore)
        problem = problem_of(options, rows_of_length(workload, asked.tokens, batch), planned, batch)
        traces = traces_of(workload, planned, tracer, cache)
        evaluator = Evaluator(problem, planned.gpu, planned.hardware.memory_bytes, traces)
        different = islice(_different(problem, random.Random(asked.seed)), asked.samples)
        drawn = [problem.baseline] if asked.fix else list(different)
        evaluator.run(drawn)
        for candidate in drawn:
            found = compared(evaluator, candidate)
            if isinstance(found, Compared):
                yield problem, found
            else:
                print(f"| {found} | | | | | | {differences(candidate, problem.baseline)} |", flush=True)


def compared(evaluator: Evaluator, candidate: Candidate) -> Compared | str:
    """Return a planned candidate with its trace of all layers, or why there is nothing to compare."""
    few = evaluator.traced_plan(candidate)
    if isinstance(few, Untraceable):
        return few.reason
    if len(few.fit.weighted()) == 1:
        return "planned from all layers"
    evaluator.trace_full_depth([candidate], varied=False)
    whole = evaluator.traced_plan(candidate)
    if isinstance(whole, Untraceable) or len(whole.fit.weighted()) > 1:
        return "all layers could not be traced"
    return Compared(candidate, few, whole)


def _different(problem: TrainerProblem, source: random.Random) -> Iterator[Candidate]:
    """Yield legal candidates, drawn by chance, no two of which train in the same way."""
    seen = set[str]()
    for candidate in at_random(problem, source, problem.size):
        way = repr(without_sizes(problem.trainer.plan(candidate, problem.setting)))
        if way not in seen:
            seen.add(way)
            yield candidate


def _line(problem: TrainerProblem, item: Compared) -> str:
    time = f"{item.time_error:+.1%}" if item.time_error is not None else "none"
    return (
        f"| {format_bytes(item.whole.memory.reserved_bytes or 0)} | {item.allocated_error:+.2%} "
        f"| {item.reserved_error:+.1%} | {item.least_error:+.1%} | {time} | {item.few.memory.error:.0%} "
        f"| {differences(item.candidate, problem.baseline)} |"
    )


def _summary(what: str, errors: Sequence[float]) -> str:
    sizes = [abs(error) for error in errors]
    return f"{what}: off by {median(sizes):.2%} in the median, {max(errors, key=abs):+.2%} at the worst"


if __name__ == "__main__":
    main()
