"""The distance of other searches from the best candidate after as many probes, replayed from measured tables.

python -m benchmarks.replay.rivals [--table long] [--seeds 20]

Beside `autotune probe`, with and without predictions: random search, Optuna's TPE and its Gaussian processes by
themselves, and the order of DeepSpeed's autotuner, which tunes the micro-batch first and then settings of ZeRO; the
other knobs stand in for these, one after another. All begin with TRL's default. What is illegal, or was probed before,
costs the others nothing. It prints Markdown: the share of the best rate that the fastest candidate so far has after so
many probes, and how many of the first 16 ran out of memory; medians.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import islice
from statistics import median

import optuna
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler

from autotune.core.candidate import Candidate, Choice
from autotune.core.effort import EFFORTS
from autotune.techniques.per_device_train_batch_size import PerDeviceTrainBatchSize
from autotune.trainers.problem import TrainerProblem
from benchmarks.replay.distorted_search import MEASURED, PROBES
from benchmarks.replay.planned_search import searched
from benchmarks.replay.tables import RECORDED, Table, read_table

MICRO_BATCH = PerDeviceTrainBatchSize.name
MOST = max(PROBES)
# Suggestions after which a search that finds nothing new to probe ends.
_SUGGESTED = 400
Search = Callable[[Table, int], Iterator[Candidate]]
GAUSSIAN_PROCESSES = "Optuna's Gaussian processes"


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay and print; return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", choices=[name.partition(".")[0] for name in MEASURED], action="append")
    parser.add_argument("--seeds", type=int, default=20)
    asked = parser.parse_args(arguments)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    optuna.logging.disable_default_handler()
    heads = " | ".join(f"after {count}" for count in PROBES)
    print(f"| table | search | {heads} | out of memory |\n|---|---|{'--:|' * (len(PROBES) + 1)}")
    for name in asked.table or [name.partition(".")[0] for name in MEASURED]:
        table = read_table(RECORDED / f"{name}.json.gz")
        for label, search in SEARCHES.items():
            if label == GAUSSIAN_PROCESSES and find_spec("scipy") is None:
                print(f"| `{name}` | {label} | not run: needs scipy |")
                continue
            runs = [shares(table, search(table, seed)) for seed in range(asked.seeds)]
            *near, failed = (median(column) for column in zip(*runs, strict=True))
            print(f"| `{name}` | {label} | {' | '.join(f'{share:.1%}' for share in near)} | {failed:g} |", flush=True)
    return 0


def shares(table: Table, probed: Iterator[Candidate]) -> tuple[float, ...]:
    """Return the shares of the best rate after so many probes, and how many of the first ones ran out of memory."""
    rates = rates_of(table)
    first = list(islice(probed, MOST))
    best = max(rates.values())
    near = (max(rates[candidate] for candidate in first[:count]) / best for count in PROBES)
    return (*near, sum(not rates[candidate] for candidate in first))


def rates_of(table: Table) -> Mapping[Candidate, float]:
    """Return the measured rate of every candidate; 0 for those that did not fit."""
    return {
        row.candidate: (row.measurement.tokens_per_second or 0.0) if row.measurement.ok else 0.0 for row in table.rows
    }


def by_autotune(*, predicted: bool) -> Search:
    """Return the search of this project, with or without predictions."""

    def search(table: Table, seed: int) -> Iterator[Candidate]:
        found = searched(table, EFFORTS["normal"], seed, None, predicted=predicted)
        yield from (record.candidate for record in found.records if record.probed)

    return search


def by_optuna(sampler: Callable[[int], BaseSampler]) -> Search:
    """Return a search by one of Optuna's samplers alone, to which running out of memory is a rate of 0."""

    def search(table: Table, seed: int) -> Iterator[Candidate]:
        problem, rates, probed = table.problem(), rates_of(table), set[Candidate]()
        choices = {knob: found for knob, found in problem.choices.items() if len(found) > 1}
        study = optuna.create_study(direction="maximize", sampler=sampler(seed))
        study.enqueue_trial(
            {
                knob: next(
                    place for place, candidate in enumerate(_changed(problem, knob)) if candidate == problem.baseline
                )
                for knob in choices
            }
        )
        for _ in range(_SUGGESTED):
            trial = study.ask()
            places = {knob: trial.suggest_categorical(knob, range(len(found))) for knob, found in choices.items()}
            candidate = problem.normal(
                problem.baseline.but(**{knob: choices[knob][int(str(place))] for knob, place in places.items()})
            )
            if candidate not in rates:
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
                continue
            study.tell(trial, rates[candidate])
            if candidate not in probed:
                probed.add(candidate)
                yield candidate

    return search


def by_deepspeed(table: Table, seed: int) -> Iterator[Candidate]:
    """Yield candidates with growing micro-batches, then with one other knob changed at a time.

    The order of ``Autotuner.tune`` (deepspeed/autotuning/autotuner.py), with other knobs in place of ZeRO's settings.
    """
    del seed
    problem, rates = table.problem(), rates_of(table)
    yield problem.baseline
    # The default's length may be illegal with every other choice: the rest follows from what is most like it.
    best = min(rates, key=lambda each: (each == problem.baseline, len(each.differences(problem.baseline))))
    probed = {problem.baseline}
    growing = sorted(problem.choices[MICRO_BATCH], key=int)
    for knob in (MICRO_BATCH, *(name for name in problem.choices if name != MICRO_BATCH)):
        for candidate in _changed(problem, knob, best, growing if knob == MICRO_BATCH else None):
            if candidate not in rates or candidate in probed:
                continue
            probed.add(candidate)
            yield candidate
            best = max(best, candidate, key=rates.__getitem__)
            if knob == MICRO_BATCH and not rates[candidate]:
                break


def _changed(
    problem: TrainerProblem, knob: str, start: Candidate | None = None, choices: Sequence[Choice] | None = None
) -> Iterator[Candidate]:
    """Yield TRL's default, or another candidate, with each choice of a knob."""
    start = start or problem.baseline
    return (problem.normal(start.but(**{knob: choice})) for choice in choices or problem.choices[knob])


SEARCHES: Mapping[str, Search] = {
    "`autotune probe`": by_autotune(predicted=True),
    "the same without predictions": by_autotune(predicted=False),
    "random": by_optuna(RandomSampler),
    "Optuna's TPE": by_optuna(lambda seed: TPESampler(seed=seed)),
    GAUSSIAN_PROCESSES: by_optuna(lambda seed: GPSampler(seed=seed)),
    "DeepSpeed's order": by_deepspeed,
}


if __name__ == "__main__":
    sys.exit(main())
