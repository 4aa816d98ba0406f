"""The promised range of a recommendation's speed against real runs of its ``train.py``.

python -m benchmarks.probe.promise BUNDLE [--rounds 20] [--seconds 15] [--fresh] [--alone]
python -m benchmarks.probe.promise MODEL DATASET [--memory-budget 900MiB] [--effort quick] …

BUNDLE is an output directory of ``autotune probe``; MODEL and DATASET are searched first. Each round runs ``train.py``
unchanged in a process of its own. Tokens per second come from TRL's own count of tokens and the clock at logged steps;
the peak from the process itself.

Without ``--fresh`` all rounds are held against the range in ``result.json``. With it each round makes a new promise of
the same training plan right before its real run, by the longer run and the turns with the baseline that a search makes:
so the promise and what it is held against see the same machine, as they would if the training began after the search.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import autotune
from autotune.core.documents.result import MeasuredCandidate, Result
from autotune.core.effort import EFFORTS, Effort
from autotune.core.files.codec import decode
from autotune.core.jobs.protocol import ProbeRequest
from autotune.core.measurement import Measurement, Schedule
from autotune.core.spread import Interval, mean_rate
from autotune.probing import JobServer, probe
from autotune.study.comparison import next_turn, wanted_runs
from autotune.study.problem import Purpose, Record, ShortRun
from autotune.units import format_bytes, format_rate
from benchmarks.probe.real_run import real_run

# Left out at the start of a real run, where caches fill and kernels are chosen.
_SETTLING_SECONDS = 3.0
_FEWEST_STEPS = 6
_SHOWN_LINES = 5
_TOKENS = re.compile(r"'num_tokens': '?([0-9.e+]+)")


@dataclass(frozen=True)
class Kept:
    """A real run: tokens per second after settling, and the peak in bytes."""

    tokens_per_second: float
    peak_bytes: int


@dataclass(frozen=True)
class Promise:
    """A promise: the mean rate, the range of a further run, and the peak in bytes."""

    tokens_per_second: float
    expected: Interval
    peak_bytes: int


Run = Callable[[MeasuredCandidate, Schedule, int], Measurement]
"""A candidate, a schedule and the number of a pair (-1 for the longer run) to what a run of it showed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Promise, run, print each round and how many were within the promise; return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("of", nargs="+", metavar="BUNDLE | MODEL DATASET", help="what `autotune probe` wrote or takes")
    parser.add_argument("--rounds", type=int, default=20, help="real runs (default: 20)")
    parser.add_argument("--seconds", type=float, default=15.0, help="of training in a real run, about (default: 15)")
    parser.add_argument("--fresh", action="store_true", help="make a new promise before each real run")
    parser.add_argument("--alone", action="store_true", help="promises without the baseline's turns: half the time")
    parser.add_argument("--effort", choices=sorted(EFFORTS), help="of promises; of a bundle by default its own")
    parser.add_argument("--memory-budget", help="of the search")
    parser.add_argument("--timeout", help="of the search")
    asked = parser.parse_args(arguments)
    if len(asked.of) > 2:
        parser.error("give a bundle, or a model and a dataset")
    with tempfile.TemporaryDirectory(prefix="autotune-") as temporary:
        folder = Path(temporary)
        result = found(asked.of, folder / "bundle", asked)
        chosen = result.recommended
        if chosen is None:
            parser.error(f"{' '.join(asked.of)}: there is no recommendation ({result.status})")
        effort = EFFORTS[asked.effort or str(result.settings.get("effort", "normal"))]
        steps = steps_in(asked.seconds + _SETTLING_SECONDS, chosen, result)
        print(f"{result.hardware.name}, {asked.rounds} runs of {steps} steps of {bundle_of(result)}/train.py")
        with JobServer(result.hardware.kind, threads=result.hardware.threads) as server:
            pairs = 2 * effort.comparisons

            def promise(number: int) -> Promise:
                if not asked.fresh:
                    return written(chosen)
                beside = None if asked.alone else result.baseline
                return promised(chosen, beside, effort, probing(server, result, folder / str(number), number * pairs))

            def train_once() -> Kept:
                return train(bundle_of(result) / "train.py", result, steps)

            held = [one_round(number, promise, train_once) for number in range(asked.rounds)]
        print(summed_up(held))
    return 0


def found(of: Sequence[str], output: Path, asked: argparse.Namespace) -> Result:
    """Return the result in a bundle, or that of a search."""
    if len(of) == 1:
        document = json.loads((Path(of[0]) / "result.json").read_text(encoding="utf-8"))
        return replace(decode(Result, document), output_directory=of[0])
    return autotune.probe(
        of[0],
        of[1],
        memory_budget=asked.memory_budget,
        effort=asked.effort or "quick",
        timeout=asked.timeout,
        output=output,
    ).document


def bundle_of(result: Result) -> Path:
    """Return where the bundle is."""
    return Path(result.output_directory)


def steps_in(seconds: float, chosen: MeasuredCandidate, result: Result) -> int:
    """Return how many optimizer steps take about so long, by the promised rate."""
    tokens = result.workload.dataset.lengths.tokens * chosen.token_coverage
    tokens_per_step = tokens / (chosen.steps_per_epoch or 1)
    return max(_FEWEST_STEPS, round(seconds * (chosen.tokens_per_second or 0.0) / tokens_per_step))


def written(chosen: MeasuredCandidate) -> Promise:
    """Return what the bundle promises.

    Raises:
        SystemExit: it has no range, because there was a single run.
    """
    rate, low, high = chosen.tokens_per_second, chosen.tokens_per_second_low, chosen.tokens_per_second_high
    if rate is None or low is None or high is None:
        raise SystemExit("The bundle states no range of the rate: its search ended before its short runs, or is old.")
    return Promise(rate, Interval(low, high), chosen.peak_bytes or 0)


def promised(chosen: MeasuredCandidate, baseline: MeasuredCandidate | None, effort: Effort, run: Run) -> Promise:
    """Return a new promise of a candidate, made as a search makes it: a longer run, then turns with the baseline.

    Raises:
        SystemExit: a run did not end ``ok``.
    """
    by_number = {one.number: one for one in (baseline, chosen) if one is not None}
    records = {
        number: Record(number, one.candidate, Purpose.SEARCH, Measurement(one.status))
        for number, one in by_number.items()
    }
    winner = replace(records[chosen.number], confirmation=run(chosen, effort.confirmation, -1))
    beside = records[baseline.number] if baseline is not None else None
    while (turn := next_turn(winner, beside, wanted_runs(winner, effort.comparisons))) is not None:
        shown = run(by_number[turn.number], effort.comparison, turn.pair)
        winner = replace(winner, comparison=(*winner.comparison, ShortRun(turn.number, shown)))
        if winner.failure is not None:
            break
    if winner.failure is not None:
        raise SystemExit(f"A run ended {winner.failure.status}: {winner.failure.reason}")
    expected = winner.prediction_interval
    assert expected is not None
    return Promise(mean_rate(winner.rates), expected, max(shown.peak_bytes or 0 for shown in winner.runs))


def probing(server: JobServer, result: Result, folder: Path, first_seed: int) -> Run:
    """Return a function that runs a candidate in an isolated process, with the limit and the rows of a search."""
    seed = int(str(result.settings.get("seed", 42)))

    def run(one: MeasuredCandidate, schedule: Schedule, pair: int) -> Measurement:
        request = ProbeRequest(
            plan=one.plan,
            model=result.workload.model_source,
            device=result.hardware.kind,
            tokenized_directory=result.workload.dataset.tokenized_directory,
            schedule=schedule,
            limit_bytes=int(result.budget_bytes * (1 - result.margin)),
            # Each promise draws its own rows, as searches with other seeds would.
            seed=seed + first_seed + 1 + pair,
        )
        return probe(server, request, folder / f"{one.number}-{pair}")

    return run


def one_round(number: int, promise: Callable[[int], Promise], train_once: Callable[[], Kept]) -> tuple[Promise, Kept]:
    """Promise, run, and print how the two compare."""
    said = promise(number)
    real = train_once()
    between = f"{said.expected.low:,.0f} to {said.expected.high:,.0f}"
    within = "within" if real.tokens_per_second in said.expected else "NOT within"
    print(
        f"{number + 1:3}  promised {format_rate(said.tokens_per_second)} ({between}), "
        f"real {format_rate(real.tokens_per_second)}, {within}; "
        f"peak promised {format_bytes(said.peak_bytes)}, real {format_bytes(real.peak_bytes)}",
        flush=True,
    )
    return said, real


def summed_up(held: Sequence[tuple[Promise, Kept]]) -> str:
    """Return how many real runs were within their promise, and how far off they were, in words."""
    within = sum(real.tokens_per_second in said.expected for said, real in held)
    ratios = sorted(real.tokens_per_second / said.tokens_per_second for said, real in held)
    widths = sorted(said.expected.high / said.tokens_per_second - 1 for said, _ in held)
    peaks = max((real.peak_bytes / said.peak_bytes for said, real in held if said.peak_bytes), default=0.0)
    return (
        f"{within} of {len(held)} real rates are within the promised range.\n"
        f"real / promised rate: {ratios[0]:.3f} to {ratios[-1]:.3f}, in the mean {mean_rate(ratios):.3f}\n"
        f"upper end of the range over the rate: +{widths[0]:.1%} to +{widths[-1]:.1%}\n"
        f"real / promised peak: at most {peaks:.3f}"
    )


def train(script: Path, result: Result, steps: int) -> Kept:
    """Run a bundle's script for so many steps, with the threads of its probes, and return what it showed.

    Raises:
        SystemExit: it failed; the message has the last it said.
    """
    run = real_run(script, result, {"--max_steps": str(steps), "--save_strategy": "no"})
    counted = ((at, _TOKENS.search(line)) for at, line in run.lines if "train_runtime" not in line)
    ticks = [(at, float(tokens.group(1))) for at, tokens in counted if tokens]
    if run.code or len(ticks) < _FEWEST_STEPS:
        raise SystemExit("\n".join([f"{script} ended with exit status {run.code}", *run.errors[-_SHOWN_LINES:]]))
    return Kept(settled_rate(ticks), run.peak_bytes or 0)


def settled_rate(ticks: Sequence[tuple[float, float]]) -> float:
    """Return the tokens per second from after the settling, or from the middle of a shorter run, to the last tick.

    Args:
        ticks: seconds and tokens so far, at the end of each step.
    """
    began = ticks[0][0]
    settled = next((place for place, (at, _) in enumerate(ticks) if at - began >= _SETTLING_SECONDS), len(ticks))
    (first, before), (last, after) = ticks[min(settled, len(ticks) // 2)], ticks[-1]
    return (after - before) / (last - first)


if __name__ == "__main__":
    sys.exit(main())
