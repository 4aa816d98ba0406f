"""The distance of a search's result from the best candidate with wrong predictions, replayed from traces.

python -m benchmarks.replay.distorted_search [--seeds 20] [--effort quick] [--by-choice 0.045 --by-combination 0.14]

Three tables hold every candidate of three spaces of an 8B shape, traced. What a probe would measure is drawn, since no
GPU measured them: the predicted rate times an error of each choice (standard deviation 20 %), one of each combination
(10 %) and the noise of a probe (4 %). A search knows the predictions of its own traces, and nothing of these errors;
memory is as predicted. Four further tables were measured on CPUs. It prints Markdown: the share of the best rate that
the fastest candidate so far has, without noise, after so many probes, TRL's default included.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median, quantiles

import numpy as np

from autotune.core.candidate import Candidate
from autotune.core.effort import EFFORTS
from autotune.core.measurement import Measurement
from autotune.core.status import ProbeStatus
from autotune.study.problem import Purpose
from benchmarks.replay.planned_search import searched
from benchmarks.replay.tables import RECORDED, Row, Table, read_table

DRAWN, MEASURED = (
    ("8b_full.json.gz", "8b_dpo.json.gz", "8b_lora.json.gz"),
    ("small.json.gz", "long.json.gz", "short.json.gz", "dpo.json.gz"),
)
PROBES = (8, 16)
BY_CHOICE, BY_COMBINATION, NOISE = 0.2, 0.1, 0.04
# Differing choices over which the correlation of combinations falls to 1/e.
_REACH = 1.5
_RAN_OUT = Measurement(ProbeStatus.OUT_OF_MEMORY, "as predicted")


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay and print; return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--effort", choices=EFFORTS, default="quick")
    parser.add_argument("--by-choice", type=float, default=BY_CHOICE)
    parser.add_argument("--by-combination", type=float, default=BY_COMBINATION)
    asked = parser.parse_args(arguments)
    heads = [f"after {count}" for count in PROBES]
    print(f"| table | predictions | {' | '.join(heads)} | at the end | p10 | probes | after the best | out of memory |")
    print("|---|---|" + "--:|" * (len(PROBES) + 5))
    for name in (*DRAWN, *MEASURED):
        table = read_table(RECORDED / name)
        for predicted in (True, False):
            runs = []
            for seed in range(asked.seeds):
                errors = asked.by_choice, asked.by_combination
                drawn = distorted(table, seed, *errors) if name in DRAWN else measured(table)
                runs.append(replay(*drawn, asked.effort, seed, predicted=predicted))
            print(row(name, runs, predicted=predicted), flush=True)
    for name in MEASURED:
        near = ", ".join(f"{share:.1%}" for share in fastest_of_rounds(read_table(RECORDED / name)))
        print(f"\nThe fastest of each round of `{name}` reaches, of the best by the other rounds: {near}.")
    return 0


def row(name: str, runs: Sequence[tuple[list[float], tuple[int, int, int]]], *, predicted: bool) -> str:
    """Return the row of a table: medians of searches with or without predictions, and the p10 of their ends."""
    shares = [f"{median(column):.1%}" for column in zip(*(shares for shares, _ in runs), strict=True)]
    worst = quantiles([shares[-1] for shares, _ in runs], n=10, method="inclusive")[0]
    counts = [f"{median(column):g}" for column in zip(*(counts for _, counts in runs), strict=True)]
    words = "yes" if predicted else "no"
    return f"| `{name}` | {words} | {' | '.join([*shares, f'{worst:.1%}', *counts])} |"


def replay(
    table: Table, true: Mapping[Candidate, float], effort: str, seed: int, *, predicted: bool
) -> tuple[list[float], tuple[int, int, int]]:
    """Search once.

    Returns:
        Shares of the best rate after so many probes and at the end; and the probes, those of the search after the
        fastest one, and those that ran out of memory.
    """
    best = max(true.values())
    probed = [
        record for record in searched(table, EFFORTS[effort], seed, None, predicted=predicted).records if record.probed
    ]

    def share(count: int) -> float:
        ran = [record for record in probed[:count] if record.measurement.ok]
        return true[max(ran, key=lambda record: record.tokens_per_second).candidate] / best if ran else 0.0

    first = max(probed, key=lambda record: record.tokens_per_second)
    after = sum(record.number > first.number and record.purpose is Purpose.SEARCH for record in probed)
    failed = sum(not record.measurement.ok for record in probed)
    return [*map(share, PROBES), share(len(probed))], (len(probed), after, failed)


def measured(table: Table) -> tuple[Table, Mapping[Candidate, float]]:
    """Return the table, and the measured rates of candidates that fit."""
    return table, {row.candidate: row.measurement.tokens_per_second or 0.0 for row in table.rows if row.measurement.ok}


def fastest_of_rounds(table: Table) -> list[float]:
    """Return for each round the share of the best rate that its fastest candidate has, by the mean of the others.

    So near does a search come that probes every candidate once.
    """
    rounds = [
        [shown.tokens_per_second or 0.0 for shown in row.measurements] for row in table.rows if row.measurement.ok
    ]
    rates = np.array([shown for shown in rounds if len(shown) == max(map(len, rounds))])
    others = (np.delete(rates, at, axis=1).mean(axis=1) for at in range(rates.shape[1]))
    return [float(mean[one.argmax()] / mean.max()) for one, mean in zip(rates.T, others, strict=True)]


def distorted(
    table: Table, seed: int, by_choice: float = BY_CHOICE, by_combination: float = BY_COMBINATION
) -> tuple[Table, Mapping[Candidate, float]]:
    """Return the table with drawn measurements, and the rates without noise of what fits.

    Args:
        by_choice, by_combination: standard deviations of the logarithms of errors.
    """
    source = np.random.default_rng(seed)
    rates = {row.candidate: rate for row in table.rows if row.traced and (rate := row.traced.tokens_per_second)}
    columns = list(dict.fromkeys(item for candidate in rates for item in candidate.items()))
    own = np.array([[item in candidate.items() for item in columns] for candidate in rates], float)
    differing = own.sum(axis=1)[:, None] - own @ own.T
    combined = by_combination**2 * np.exp(-differing / _REACH) + 1e-9 * np.eye(len(own))
    errors = own @ source.normal(0, by_choice, len(columns)) + source.multivariate_normal(np.zeros(len(own)), combined)
    factors = dict(zip(rates, np.exp(errors), strict=True))
    noise = np.exp(source.normal(0, NOISE, len(own)))
    noisy = dict(zip(rates, noise, strict=True))

    def drawn(row: Row) -> Row:
        memory, candidate = row.traced.memory if row.traced else None, row.candidate
        if candidate not in rates or memory is None or memory.device_bytes > table.limit_bytes:
            return replace(row, measurements=(_RAN_OUT,))
        rate = float(rates[candidate] * factors[candidate] * noisy[candidate])
        need_bytes = memory.device_bytes
        ok = Measurement(ProbeStatus.OK, peak_bytes=need_bytes, reserved_bytes=need_bytes, tokens_per_second=rate)
        return replace(row, measurements=(ok,))

    rows = [drawn(row) for row in table.rows]
    baseline = table.problem().baseline
    if baseline not in {row.candidate for row in rows}:
        rows.append(Row(baseline, (_RAN_OUT,)))
    fits = [row.candidate for row in rows if row.measurement.ok]
    return replace(table, rows=tuple(rows)), {candidate: rates[candidate] * factors[candidate] for candidate in fits}


if __name__ == "__main__":
    sys.exit(main())
