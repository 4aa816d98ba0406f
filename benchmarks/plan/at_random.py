"""Is a random legal candidate faster than the best that ``autotune plan`` found?

Run ``python -m benchmarks.plan.at_random [--allow lora,quantization] [--count 1000]``; no GPU is needed. It plans an 8B
shape on an H100 as ``autotune plan`` does, then traces legal candidates that are drawn evenly from the whole space, and
prints how many of them fit and how fast the fastest of them is.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from autotune.app.arguments import SearchArguments
from autotune.app.options import checked_options
from autotune.app.planned import planned_machine, planned_workload
from autotune.app.problem import global_batch_of, problem_of
from autotune.app.requests import traces_of
from autotune.app.tracking import Tracking
from autotune.core.candidate import Candidate
from autotune.core.documents.estimate import Estimate
from autotune.core.events import ignore
from autotune.inspection.dataset import dataset_source
from autotune.inspection.model import model_source
from autotune.planning.evaluator import Evaluator
from autotune.planning.tracing.cache import Cache
from autotune.probing.tracing import ServerTracer
from autotune.reporting.words import differences
from autotune.trainers.problem import TrainerProblem
from benchmarks.shapes import LETTER, LLAMA_8B, write_model

_ROWS = 400
_SHORTEST, _LONGEST = 50, 4000
_AT_ONCE = 50
_MAX_DRAWN = 1000
"""Draws for each candidate that is wanted, after which the space is taken to have no more."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan, trace random candidates, and print the comparison; return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="H100-80GB")
    parser.add_argument("--allow", default="", help="techniques that change training, separated by commas")
    parser.add_argument("--count", type=int, default=1000, help="random candidates")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache", type=Path, help="a folder that keeps the traces; none: they are not kept")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="autotune-") as folder:
        _compare(asked, Path(folder))
    return 0


def _compare(asked: argparse.Namespace, folder: Path) -> None:
    model, data = write_model(folder / "model", LLAMA_8B), folder / "data.jsonl"
    data.write_text("".join(json.dumps({"text": LETTER * tokens}) + "\n" for tokens in lengths()), encoding="utf-8")
    allow = tuple(name for name in asked.allow.split(",") if name)
    planned, options = planned_machine(asked.gpu), checked_options(SearchArguments(trainer="sft", allow=allow))
    cache, budget_bytes = Cache(asked.cache or folder / "cache"), planned.hardware.available_bytes
    with ServerTracer(planned.hardware.cores, ignore) as tracer:
        sources = model_source(str(model), "random"), dataset_source(str(data))
        workload = planned_workload(options, *sources, tracer, cache, ignore)
        problem = problem_of(options, workload, planned, global_batch_of(options, planned))
        evaluator = Evaluator(problem, planned.gpu, budget_bytes, traces_of(workload, planned, tracer, cache))
        started = time.monotonic()
        Tracking(ignore).search(evaluator)
        best, searched = evaluator.ranked()[0], len(evaluator.candidates)
        print(f"search: {searched} of {problem.size:,} in {time.monotonic() - started:.0f} s: {_row(best, problem)}")
        drawn = list(at_random(problem, random.Random(asked.seed), asked.count))
        for number in range(0, len(drawn), _AT_ONCE):
            evaluator.run(drawn[number : number + _AT_ONCE])
            fitting = [each for each in map(evaluator.estimate, drawn[: number + _AT_ONCE]) if each.fits]
            faster = [each for each in fitting if _rate(each) > 1.01 * _rate(best)]
            done, seconds = min(number + _AT_ONCE, len(drawn)), time.monotonic() - started
            print(
                f"at random: {done} of {len(drawn)} in {seconds:.0f} s; {len(fitting)} fit, {len(faster)} of them more "
                "than 1 % faster",
                flush=True,
            )
    for each in sorted(fitting, key=_rate, reverse=True)[:5]:
        print(f"  {_row(each, problem)}")


def _rate(estimate: Estimate) -> float:
    return estimate.tokens_per_second or 0.0


def lengths() -> Iterator[int]:
    """Yield the tokens of rows: many short ones, few long ones, spread evenly over the logarithm."""
    for number in range(_ROWS):
        yield round(_SHORTEST * (_LONGEST / _SHORTEST) ** (number / (_ROWS - 1)))


def at_random(problem: TrainerProblem, source: random.Random, count: int) -> Iterator[Candidate]:
    """Yield this number of different legal candidates in normal form, or fewer if the space has no more."""
    seen: set[Candidate] = set()
    for _ in range(count * _MAX_DRAWN):
        chosen = {knob: source.choice(choices) for knob, choices in problem.choices.items()}
        candidate = problem.normal(Candidate(chosen))
        if candidate not in seen and problem.illegal(candidate) is None:
            seen.add(candidate)
            yield candidate
        if len(seen) == count:
            return


def _row(estimate: Estimate, problem: TrainerProblem) -> str:
    rate = f"{estimate.tokens_per_second:,.0f} tok/s" if estimate.tokens_per_second else "no time"
    return f"{rate}, {differences(estimate.candidate, problem.baseline)}"


if __name__ == "__main__":
    sys.exit(main())
