"""The effect of another process on a core: on a search's recommendation, and on its promised speed.

python -m benchmarks.probe.busy FOLDER [--searches 10] [--further 2] [--precision float32]

A 13M Llama is searched once on an idle machine, and then by further seeds while a process computes half of the time on
the first core. Right after each of these searches, and beside the same process, its ``train.py`` runs for about 15
seconds, and is held against the promised range. At last, idle again, the distinct recommendations train in turn, and
their rates are held against that of the idle search. What is in FOLDER already is not run again.
"""

from __future__ import annotations

import argparse
import json
import runpy
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from transformers import AutoConfig, AutoModelForCausalLM

import autotune
from autotune.core.documents.result import Result
from benchmarks.probe.promise import bundle_of, found, steps_in, train, written
from benchmarks.shapes import SMALL_WORKLOAD

_BUDGET = "1500MiB"
_SECONDS = 18.0
"""Of a real run, without the first 3."""
_ROUNDS = 3
"""Of the comparison on an idle machine."""
_SIZES = {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 7,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 64,
}
_COMPUTES_HALF_OF_THE_TIME = """
import os, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
while True:
    began = time.monotonic()
    while time.monotonic() - began < 0.05:
        pass
    time.sleep(0.05)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Search, train and compare; print a table of Markdown and return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the workload, the bundles and the rates")
    parser.add_argument("--searches", type=int, default=10, help="beside the other process (default: 10)")
    parser.add_argument("--further", type=int, default=2, help="real runs after each search (default: 2)")
    parser.add_argument("--precision", help="of all candidates, on a CPU without instructions for TRL's default bf16")
    options = parser.parse_args(arguments)
    model, data = workload(options.folder)
    fix = {"precision": options.precision} if options.precision else {}
    searches = [searched(model, data, options.folder, 0, fix)]
    with another_process():
        for seed in range(1, options.searches + 1):
            searches.append(searched(model, data, options.folder, seed, fix))
            rates = read_rates(options.folder / f"busy-{seed}.json")
            while len(rates) < options.further:
                rates.append(real_rate(searches[-1]))
                write_rates(options.folder / f"busy-{seed}.json", rates)
            print(seed, described(searches[-1]), *(f"{rate:,.0f}" for rate in rates), flush=True)
    print(table(searches, idle_rates(searches, options.folder / "idle.json"), options.folder))
    return 0


def workload(folder: Path) -> tuple[Path, Path]:
    """Return the folder of the model and the file of the rows, written unless they are there."""
    model, data = folder / "model", folder / "data.jsonl"
    if not data.exists():
        runpy.run_path(str(SMALL_WORKLOAD))["build"](folder)
        config = AutoConfig.from_pretrained(model)
        config.update(_SIZES)
        AutoModelForCausalLM.from_config(config).save_pretrained(model)
    return model, data


@contextmanager
def another_process() -> Iterator[None]:
    """Compute half of the time on the first core within the context."""
    with subprocess.Popen([sys.executable, "-c", _COMPUTES_HALF_OF_THE_TIME]) as process:
        try:
            yield
        finally:
            process.kill()


def searched(model: Path, data: Path, folder: Path, seed: int, fix: Mapping[str, str]) -> Result:
    """Return the result in the folder of a seed, of a search now, with some choices fixed, unless it is there."""
    output = folder / f"search-{seed}"
    if not (output / "result.json").exists():
        autotune.probe(model, data, memory_budget=_BUDGET, effort="quick", seed=seed, fix=fix, output=output)
    return found([str(output)], output, argparse.Namespace())


def real_rate(result: Result) -> float:
    """Return the tokens per second of the recommendation's ``train.py``."""
    assert result.recommended is not None
    return train(
        bundle_of(result) / "train.py", result, steps_in(_SECONDS, result.recommended, result)
    ).tokens_per_second


def idle_rates(searches: Sequence[Result], file: Path) -> dict[str, float]:
    """Return the rate of each distinct recommendation on an idle machine: the median of some runs in turn."""
    distinct = {described(result): result for result in searches}
    rounds = dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else {}
    for _ in range(_ROUNDS):
        for name, result in distinct.items():
            if len(rates := rounds.setdefault(name, [])) < _ROUNDS:
                rates.append(real_rate(result))
                file.write_text(json.dumps(rounds), encoding="utf-8")
    return {name: median(rates) for name, rates in rounds.items()}


def read_rates(file: Path) -> list[float]:
    """Return the rates in a file; none if there is no such file."""
    return list(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else []


def write_rates(file: Path, rates: Sequence[float]) -> None:
    """Write rates into a file."""
    file.write_text(json.dumps(rates), encoding="utf-8")


def described(result: Result) -> str:
    """Return the choices of the recommendation that differ from TRL's default."""
    assert result.recommended is not None
    assert result.baseline is not None
    differing = result.recommended.candidate.differences(result.baseline.candidate)
    return " ".join(f"{knob}={choice}" for knob, choice in differing.items())


def table(searches: Sequence[Result], idle: Mapping[str, float], folder: Path) -> str:
    """Return the rows of all searches, and in how many the rate and the promise hold."""
    best = idle[described(searches[0])]
    lines = ["| seed | recommended | promised, tok/s | range | real, beside the process | idle | of the idle search |"]
    lines.append("|--:|---|--:|--:|--:|--:|--:|")
    within, runs, near, widths = 0, 0, 0, []
    for seed, result in enumerate(searches):
        assert result.recommended is not None
        promise = written(result.recommended)
        rates = read_rates(folder / f"busy-{seed}.json")
        within += sum(one in promise.expected for one in rates)
        runs += len(rates)
        rate = idle[described(result)]
        near += bool(seed) and rate >= 0.95 * best
        widths.append(promise.expected.high / promise.tokens_per_second - 1)
        lines.append(
            f"| {seed} | {described(result)} | {promise.tokens_per_second:,.0f} "
            f"| {promise.expected.low:,.0f} to {promise.expected.high:,.0f} "
            f"| {', '.join(f'{one:,.0f}' for one in rates) or 'idle'} "
            f"| {rate:,.0f} | {rate / best:.1%} |"
        )
    lines.append("")
    lines.append(
        f"{near} of {len(searches) - 1} recommendations reach 95 % of the idle search's rate. {within} of {runs} "
        f"further runs are within the promised range, whose upper end is {median(widths[1:]):.1%} above the promised "
        "rate in the median."
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
