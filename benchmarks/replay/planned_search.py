"""The number of probes of a search with and without predictions, replayed from a recorded table.

python -m benchmarks.replay.planned_search [--table benchmarks/replay/recorded/small.json.gz] [--seeds 10]

Every probe is answered by what `record_table.py` measured of that candidate, and every estimate by its recorded traces:
those of a search by traces at first, and of each candidate that comes to be probed. It prints Markdown. Two things are
asked of each seed: how many probes, the baseline's included, it takes until one is within 2 % (and 20 %) of the fastest
candidate that fits, in a search that goes on until then; and what a search of `--effort quick` ends with. Confirmations
do not count. "Predicted" are searches with predictions; "avoidable" are probes that ran out of memory and whose traced
tensors alone are more than the limit.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from autotune.core.candidate import Candidate
from autotune.core.documents.estimate import Estimate, Origin
from autotune.core.effort import EFFORTS, Effort
from autotune.core.events import ignore
from autotune.core.measurement import Measurement
from autotune.core.status import ProbeStatus
from autotune.planning.predictor import PlannedPredictor
from autotune.study.improvement import search_by_traces
from autotune.study.problem import ProbeRun, SearchOutcome, StudyStorage
from autotune.study.searching import search
from benchmarks.replay.tables import RECORDED, RecordedRunner, Table, read_table

NEAR = (0.98, 0.80)
_OUT_OF_MEMORY = (ProbeStatus.OUT_OF_MEMORY, ProbeStatus.HOST_OUT_OF_MEMORY)


@dataclass(frozen=True)
class Run:
    """One search.

    Attributes:
        probes: until one was near the best, that one included; None where none was.
        out_of_memory: of these, those that ran out of memory.
        avoidable: of these, those whose traced tensors alone are more than the limit.
        share: of the best rate, what the search ended with.
        total: probes of the whole search.
    """

    probes: int | None
    out_of_memory: int
    avoidable: int
    share: float
    total: int


class RecordedEstimates:
    """Estimates as they were recorded, of what a search by traces looks at first and of what is traced later."""

    def __init__(self, table: Table) -> None:
        self.budget_bytes = table.limit_bytes
        self._runner = RecordedRunner(table)
        search_by_traces(table.replayed(), self._runner)
        self._traced = dict.fromkeys(self._runner.asked)

    @property
    def candidates(self) -> Sequence[Candidate]:
        """The candidates that were traced."""
        return tuple(self._traced)

    def estimate(self, candidate: Candidate) -> Estimate:
        """Return the estimate of a candidate."""
        if candidate not in self._traced:
            return Estimate(candidate, Origin.UNKNOWN, reason="it was not traced")
        return self._runner.estimate(candidate)

    def run(self, candidates: Sequence[Candidate]) -> list[Estimate]:
        """Trace candidates."""
        self._traced.update(dict.fromkeys(candidates))
        return [self.estimate(candidate) for candidate in candidates]


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay and print; return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, default=RECORDED / "small.json.gz")
    parser.add_argument("--seeds", type=int, default=10)
    asked = parser.parse_args(arguments)
    table = read_table(asked.table)
    shown = [row.measurement for row in table.rows]
    print(
        f"{len(table.rows)} candidates, of which {sum(item.ok for item in shown)} fit and "
        f"{sum(item.status in _OUT_OF_MEMORY for item in shown)} ran out of memory; the best reaches "
        f"{best_rate(table):,.0f} tok/s.\n"
    )
    quick = EFFORTS["quick"]
    patient = replace(quick, trials=len(shown), patience=len(shown))
    wanted = [(f"Until within {1 - share:.0%} of the best", patient, share) for share in NEAR]
    for title, effort, share in (*wanted, ("`--effort quick`", quick, None)):
        runs = [
            (replay(table, effort, seed, share, predicted=False), replay(table, effort, seed, share, predicted=True))
            for seed in range(asked.seeds)
        ]
        print(f"## {title}\n\n{page(runs)}\n", flush=True)
    return 0


def best_rate(table: Table) -> float:
    """Return the highest rate of a candidate that fits."""
    return max(row.measurement.tokens_per_second or 0.0 for row in table.rows if row.measurement.ok)


def replay(table: Table, effort: Effort, seed: int, until: float | None, *, predicted: bool) -> Run:
    """Search the table once, to the end or until a probe reached so much of the best rate."""
    outcome = searched(table, effort, seed, until, predicted=predicted)
    enough = best_rate(table) * (until or max(NEAR))
    probed = [record for record in outcome.records if record.probed]
    near = [number for number, record in enumerate(probed, 1) if record.tokens_per_second >= enough]
    counted = probed[: near[0]] if near else probed
    failed = [record.candidate for record in counted if record.measurement.status in _OUT_OF_MEMORY]
    needs = {row.candidate: row.traced.memory.peak_bytes for row in table.rows if row.traced and row.traced.memory}
    return Run(
        probes=near[0] if near else None,
        out_of_memory=len(failed),
        avoidable=sum(needs.get(candidate, 0) > table.limit_bytes for candidate in failed),
        share=(outcome.winner.tokens_per_second if outcome.winner else 0.0) / best_rate(table),
        total=len(probed),
    )


def searched(table: Table, effort: Effort, seed: int, until: float | None, *, predicted: bool) -> SearchOutcome:
    """Return the result of a search of the table."""
    near: set[Candidate] = set()
    shown = {row.candidate: row.measurement for row in table.rows}
    problem = table.replayed()
    enough = best_rate(table) * (until or math.inf)

    def probe(run: ProbeRun, seconds_left: float | None) -> Measurement:
        del seconds_left
        if near:
            raise KeyboardInterrupt
        measurement = shown[run.candidate]
        if (measurement.tokens_per_second or 0.0) >= enough:
            near.add(run.candidate)
        return measurement

    estimates = RecordedEstimates(table)
    predictor = PlannedPredictor(estimates, lambda _: None)  # type: ignore[arg-type]
    return search(
        problem,
        probe,
        effort=effort,
        memory_limit_bytes=table.limit_bytes,
        seed=seed,
        trials=None,
        timeout_seconds=None,
        storage=StudyStorage("sqlite://", "replay", resume=False, fingerprint={}),
        listener=ignore,
        predictor=predictor if predicted else None,
    )


def page(runs: Sequence[tuple[Run, Run]]) -> str:
    """Return a Markdown table of searches without and with predictions, a row for each seed and one of medians."""
    figures = "probes | out of memory | avoidable | ends at |"
    lines = [f"| seed | {figures} predicted: {figures}", "|---|--:|--:|--:|--:|--:|--:|--:|--:|"]
    lines += [f"| {seed} | {' | '.join(map(_run_text, pair))} |" for seed, pair in enumerate(runs)]
    medians = [_run_text(_median(column)) for column in zip(*runs, strict=True)]
    return "\n".join([*lines, f"| **median** | {' | '.join(medians)} |"])


def _run_text(run: Run) -> str:
    probes = f"{run.probes:g}" if run.probes is not None else f"not in {run.total:g}"
    return f"{probes} | {run.out_of_memory:g} | {run.avoidable:g} | {run.share:.1%}"


def _median(runs: Sequence[Run]) -> Run:
    """Return the median of each figure; a search that never came near counts with all its probes."""
    return Run(
        probes=round(median(run.total if run.probes is None else run.probes for run in runs)),
        out_of_memory=round(median(run.out_of_memory for run in runs)),
        avoidable=round(median(run.avoidable for run in runs)),
        share=median(run.share for run in runs),
        total=round(median(run.total for run in runs)),
    )


if __name__ == "__main__":
    sys.exit(main())
