"""The distance of a search by traces from the best candidate, and the effect of each of its rules, replayed.

python -m benchmarks.replay.traced_search [--orders 10]

Three tables hold every candidate of parts of an 8B shape's space, traced; three further ones those of small models.
Each is searched with several budgets, in several orders of its knobs, which decide ties and random candidates. It
prints Markdown: of how many searches the best candidate is within 1 % of the best of the whole table, how near the
worst of them came, and how many candidates are traced in the mean; as it is, and without each of its rules.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from statistics import fmean
from unittest.mock import patch

from autotune.core.candidate import Candidate
from autotune.core.documents.estimate import Estimate, Runner, rank_key
from autotune.study import improvement
from autotune.study.problem import Problem
from benchmarks.replay.tables import RECORDED, RecordedRunner, Reordered, Table, read_table

CASES: Sequence[tuple[str, float]] = (
    *product(["8b_full", "8b_dpo", "8b_lora"], [1.5, 1.0, 0.8, 0.5, 0.25]),
    *product(["small", "long", "dpo"], [1.5, 1.0, 0.5]),
)
"""Tables, and budgets as shares of the recorded one."""
NEAR = 0.99


def _of(name: str, value: object) -> Callable[[], AbstractContextManager[object]]:
    return lambda: patch.object(improvement, name, value)


def _method(name: str, value: Callable[..., object]) -> Callable[[], AbstractContextManager[object]]:
    return lambda: patch.object(improvement.Improvements, name, value)


RULES: Mapping[str, Callable[[], AbstractContextManager[object]]] = {
    "as it is": nullcontext,
    "without changes of the fastest that does not fit": _method("_neighbours_of_fastest_misfit", lambda *_: []),
    "without faster changes of the best": _method("_faster_changes", lambda *_: []),
    "without further changes of the most promising": _of("_EXPANSIONS", 0),
    "without random candidates": _of("_RANDOM_CANDIDATES", 0),
    "without an end after 24 without improvement": _of("_PATIENCE", 1000),
    "without what is shown beside the best": _method("_shown_candidates", lambda *_: iter(())),
    "with the recipes left out": lambda: patch.object(improvement, "search_by_traces", _without_recipes),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay and print; return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--orders", type=int, default=10)
    asked = parser.parse_args(arguments)
    tables = {name: read_table(RECORDED / f"{name}.json.gz") for name in dict(CASES)}
    print("| search | within 1 % | worst | traces, mean |\n|---|--:|--:|--:|")
    for rule, without in RULES.items():
        with without():
            found = [searched(tables[name], budget, seed) for name, budget in CASES for seed in range(asked.orders)]
        shares = [share for share, _ in found]
        near, traces = sum(share >= NEAR for share in shares), fmean(count for _, count in found)
        print(f"| {rule} | {near} of {len(found)} | {min(shares):.1%} | {traces:.1f} |", flush=True)
    return 0


def searched(table: Table, budget: float, seed: int) -> tuple[float, int]:
    """Return the share of the best that one search found, and how many candidates it traced.

    Where nothing fits, the share is of memory.
    """
    runner = RecordedRunner(table, round(budget * table.limit_bytes))
    improvement.search_by_traces(Reordered(table.replayed(), seed), runner)  # type: ignore[arg-type]
    known = (each for each in map(runner.estimate, runner.asked) if each.memory is not None)
    return _share(min(known, key=rank_key), runner.everything()[0]), len(runner.asked)


def _share(found: Estimate, best: Estimate) -> float:
    if found.fits != best.fits or found.memory is None or best.memory is None:
        return 0.0
    if best.fits:
        return (found.tokens_per_second or 0.0) / (best.tokens_per_second or 1.0)
    return best.memory.device_bytes / found.memory.device_bytes


def _without_recipes(problem: Problem, runner: Runner, *, starts: Sequence[Candidate] = ()) -> bool:
    return _SEARCH(problem, runner, starts=starts)


_SEARCH = improvement.search_by_traces


if __name__ == "__main__":
    sys.exit(main())
