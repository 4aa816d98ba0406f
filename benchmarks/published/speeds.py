"""Compares predicted times of steps with published speeds: ``python -m benchmarks.published.speeds``.

Nothing is fitted to the rows but ``sustained``, one figure for the A100 with NVLink and one for all other cards (and
the share of three consumer cards, which is marked); llm-foundry's rows on the H100 took no part in that.
Lit-GPT's rows need its code and Lightning on PYTHONPATH, as `published.md` has it.
Each row is predicted with the roofline of the data sheets, with the rates of operators alone, and with both and that
figure. A step is traced with one and with two layers; the time goes with the layers.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from autotune.core.gpu import AchievedRates, Gpu
from autotune.core.plan import Launch
from autotune.core.step_time import HOST_BOUND_ERROR, TIME_ERROR, USUAL_PACE, Pace
from autotune.inspection.gpus import listed_gpu
from autotune.virtual import trace
from autotune.virtual.cost.roofline import Access, Kind, Work, operator_seconds, step_seconds
from benchmarks.published.shapes import Published, published

PAGE = Path(__file__).with_name("speeds.md")
DATA = Path(__file__).with_name("speeds.csv")
_ROOFLINE_LAUNCH_SECONDS = 1e-5
"""The host's time for an operator beside the roofline, before rates were known."""
_FAST_LAUNCH_SECONDS = 3e-5
"""The host's time with which the rows of a fast host are predicted once more."""
_LATER = ("llm-foundry MPT H100-80", "Lit-GPT LoRA")
"""Tables that were added after it was set what errors are wanted."""
_FAST_HOST, _UNCACHED = "fast host", "uncached"
"""Names of models beside those of the summary: with a fast host, and with no cache, both with operators alone."""


@dataclass(frozen=True)
class Predicted:
    """A row with its predicted seconds of an optimizer step, by the name of the model.

    Attributes:
        host_bound: whether the host is predicted to take longer for a layer than the device.
    """

    row: Published
    seconds: Mapping[str, float]
    host_bound: bool = False

    @property
    def stated_error(self) -> float:
        """The stated relative error of a planned time."""
        return HOST_BOUND_ERROR if self.host_bound else TIME_ERROR

    def error(self, model: str) -> float:
        """Return the error of a prediction as a share of the measured time; below 0: too fast."""
        return self.seconds[model] / self.row.seconds - 1


def models(gpu: Gpu, own: Mapping[str, Any]) -> Mapping[str, tuple[Gpu, Pace]]:
    """Return the GPU as each model of time has it.

    Args:
        own: achieved rates in place of the catalogue's.
    """
    assert gpu.speeds is not None
    rates = replace(gpu.speeds.achieved, **own)

    def with_rates(achieved: AchievedRates) -> Gpu:
        assert gpu.speeds is not None
        return replace(gpu, speeds=replace(gpu.speeds, achieved=achieved))

    return {
        "roofline": (with_rates(AchievedRates()), Pace(launch_seconds=_ROOFLINE_LAUNCH_SECONDS)),
        "operators alone": (with_rates(replace(rates, sustained=1.0)), Pace()),
        _FAST_HOST: (with_rates(replace(rates, sustained=1.0)), Pace(launch_seconds=_FAST_LAUNCH_SECONDS)),
        _UNCACHED: (with_rates(replace(rates, sustained=1.0, cache_bytes=0.0)), Pace()),
        "sustained": (with_rates(rates), Pace()),
    }


def predicted(row: Published) -> Predicted | None:
    """Return a row with its predictions, or None where its setting or its card is not known."""
    gpu = listed_gpu(row.gpu)
    if row.step is None or gpu is None or gpu.speeds is None or gpu.compute_capability is None:
        return None
    works = [_works(row, layers, gpu.compute_capability) for layers in (1, 2)]
    launch = Launch(processes=row.gpus) if row.gpus <= 8 else Launch()
    found, host_bound = {}, False
    for model, (device, pace) in models(gpu, row.rates).items():
        one, two = (step_seconds(each, device, pace, launch) for each in works)
        host_bound = two.launch_seconds - one.launch_seconds > two.device_seconds - one.device_seconds
        passes = one.seconds + (row.layers - 1) * (two.seconds - one.seconds)
        passes += _moving(row.copied_bytes, Access.POINTWISE, device, pace)
        micro_batch = max(passes, _gathering(row, device, pace, launch))
        found[model] = row.micro_batches * micro_batch + _moving(row.pass_bytes, Access.OPTIMIZER, device, pace)
    return Predicted(row, found, host_bound)


def _works(row: Published, layers: int, capability: tuple[int, int]) -> list[Work]:
    assert row.step is not None
    traced = trace(row.step(layers), capability=capability)
    operators = traced.operators
    for phase in traced.phases:
        if row.phase and phase.name == row.phase:
            operators = operators[phase.first_operator : phase.end_operator]
    return [operator.work for operator in operators if operator.work.kind is not Kind.NOTHING]


def _moving(moved_bytes: int, access: Access, device: Gpu, pace: Pace) -> float:
    """Return the time in which the device reads and writes a number of bytes."""
    assert device.speeds is not None
    return operator_seconds(Work(Kind.ELEMENTWISE, bytes_read=moved_bytes, access=access), device.speeds, pace)


def _gathering(row: Published, device: Gpu, pace: Pace, launch: Launch) -> float:
    """Return how long the links need for a micro-batch, which overlaps with its passes."""
    if not row.gathered_bytes:
        return 0.0
    sent = 3 * row.gathered_bytes * (row.gpus - 1) // row.gpus
    return step_seconds([Work(Kind.COMMUNICATION, bytes_written=sent)], device, pace, launch).seconds


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


def tables(rows: Iterable[Predicted]) -> Mapping[str, list[Predicted]]:
    """Return the rows that count, by their table."""
    found: dict[str, list[Predicted]] = defaultdict(list)
    for each in rows:
        if each.row.kind == "main":
            found[each.row.table].append(each)
    return found


def summary(rows: Iterable[Predicted]) -> Iterator[str]:
    """Yield the lines of a table: median, 90th percentile and bias of each publisher, by model."""
    names = ("roofline", "operators alone", "sustained")
    yield "| table | rows | " + " | ".join(f"{name}: median, p90, bias" for name in names) + " | rank correlation |"
    yield "|---|--:|" + "--:|" * (len(names) + 1)
    over: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for table, found in tables(rows).items():
        cells = []
        for name in names:
            errors = [each.error(name) for each in found]
            sizes = list(map(abs, errors))
            over[name].append((statistics.median(sizes), _quantile(sizes, 0.9), statistics.median(errors)))
            cells.append(_cell(over[name][-1]))
        yield f"| {table} | {len(found)} | " + " | ".join(cells) + f" | {_rank_correlation(found):.2f} |"
    middle = [_cell(tuple(map(statistics.median, zip(*over[name], strict=True)))) for name in names]
    yield "| **median over tables** | | " + " | ".join(middle) + " | |"


def reached(rows: Sequence[Predicted]) -> Iterator[str]:
    """Yield for each model the goals for its errors, and whether they are met, with and without later tables."""
    first = [each for each in rows if each.row.table not in _LATER]
    for name, wanted in (("operators alone", (0.10, 0.25)), ("sustained", (0.07, 0.20))):
        for those, some in (("the tables that this was set for", first), ("all", rows)):
            each = [[abs(one.error(name)) for one in found] for found in tables(some).values()]
            found = (
                statistics.median(map(statistics.median, each)),
                statistics.median(_quantile(errors, 0.9) for errors in each),
            )
            words = (
                f"{aim:.0%} ({'reached' if error <= aim else 'not reached'}: {error:.1%})"
                for aim, error in zip(wanted, found, strict=True)
            )
            yield f"- {name}, {those}: {' and '.join(words)}"


def _cell(figures: Iterable[float]) -> str:
    median, high, bias = figures
    return f"{median:.1%}, {high:.1%}, {bias:+.1%}"


def _rank_correlation(found: Sequence[Predicted]) -> float:
    """Return Spearman's coefficient of measured and predicted times."""
    if len(found) < 2:
        return 1.0
    times = [each.row.seconds for each in found], [each.seconds["sustained"] for each in found]
    ranks = [np.argsort(np.argsort(np.asarray(each))) for each in times]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def pairs(rows: Iterable[Predicted], differ: float = 0.05) -> tuple[int, int]:
    """Return of how many pairs of GPUs on one training the faster one is predicted, and the number of pairs.

    Args:
        differ: share by which measured speeds differ at least.
    """
    alike: dict[str, list[Predicted]] = defaultdict(list)
    for each in (each for found in tables(rows).values() for each in found):
        if each.row.training:
            alike[each.row.training].append(each)
    right = total = 0
    for group in alike.values():
        for index, one in enumerate(group):
            for other in group[index + 1 :]:
                measured, foretold = (_speed(one, kind) / _speed(other, kind) for kind in ("", "sustained"))
                if max(measured, 1 / measured) >= 1 + differ:
                    total += 1
                    right += (measured > 1) == (foretold > 1)
    return right, total


def _speed(each: Predicted, model: str) -> float:
    """Return rows per second, measured or predicted."""
    return each.row.rows / (each.seconds[model] if model else each.row.seconds)


def held(rows: Sequence[Predicted]) -> Iterator[str]:
    """Yield the number of rows within a plan's stated error, by the resource that bounds their layers."""

    def within(some: Sequence[Predicted]) -> str:
        return f"{sum(abs(each.error('sustained')) <= each.stated_error for each in some)} of {len(some)}"

    bound = [each for each in rows if each.host_bound]
    others = [each for each in rows if not each.host_bound]
    yield f"Within the error that a plan states are {within(rows)} rows: {within(others)} within ±{TIME_ERROR:.0%}, and"
    yield f"{within(bound)} within ±{HOST_BOUND_ERROR:.0%}, whose layers are predicted to take the host longer than the"
    yield "device."


def of_a_fast_host(rows: Sequence[Predicted]) -> Iterator[str]:
    """Yield how far PEFT's rows are off with operators alone, without the cache, and with a fast host."""
    found = [each for each in rows if each.row.table.startswith("PEFT")]
    if not found:
        return
    plain, uncached, fast = (
        f"{statistics.median(abs(each.error(name)) for each in found):.1%}"
        for name in ("operators alone", _UNCACHED, _FAST_HOST)
    )
    bound = sum(each.host_bound for each in found)
    fast_us, usual_us = _FAST_LAUNCH_SECONDS * 1e6, USUAL_PACE.launch_seconds * 1e6
    yield "PEFT's rows have the mean of the durations that its loop recorded of 5,000 steps. Its `train_time` has"
    yield "the evaluation on test data, too, and the time between steps. Their tensors of 5 to 14 MB lie in the L2"
    yield f"cache of an L40S, which holds 80 MB: operators alone are {plain} off in the median, and {uncached} if all"
    yield f"pass through the memory. {bound} of {len(found)} rows are predicted to be bound by the host, whose time for"
    yield f"an operator is not known: with {fast_us:.0f} µs in place of {usual_us:.0f}, operators alone are {fast} off."


def without_their_own(rows: Iterable[Predicted]) -> Iterator[tuple[str, float, float]]:
    """Yield each publisher with the sustained factor that the others' tables give, and its median error with that.

    The time of a step is taken to go with the factor, which holds where the device bounds it.
    """
    by_publisher: dict[str, list[list[Predicted]]] = defaultdict(list)
    for table, found in tables(rows).items():
        by_publisher[table.split()[0]].append(found)
    if len(by_publisher) < 2:
        return
    for publisher, own in by_publisher.items():
        others = [table for name, known in by_publisher.items() if name != publisher for table in known]
        factor = statistics.median(statistics.median(_ratio(each) for each in table) for table in others)
        errors = [abs(factor / _ratio(each) - 1) for table in own for each in table]
        yield publisher, factor, statistics.median(errors)


def _ratio(each: Predicted) -> float:
    return each.row.seconds / each.seconds["sustained"]


def page(rows: Sequence[Predicted], left_out: Sequence[Published]) -> str:
    """Return the page: the summary, then row by row."""
    right, total = pairs(rows)
    lines = [
        "# Published speeds, predicted",
        "",
        "Times of training steps as others measured them on GPUs, and as they are predicted. Written by",
        "`python -m benchmarks.published.speeds` from `speeds.csv`. No GPU took part.",
        "",
        "- **roofline**: the peaks of data sheets, and 10 µs of the host for each operator: before rates were known.",
        "- **operators alone**: shares of these peaks that single operators reach, measured by others",
        f"  (`autotune/inspection/achieved.yaml`), and {USUAL_PACE.launch_seconds * 1e6:.0f} µs of the host",
        "  for an operator of a module, half of that in the backward pass (`autotune/core/step_time.py`). Tensors that",
        "  the L2 cache still holds pass at its rate.",
        "  Nothing is fitted to these rows, except the share of the matrix products of RTX 3090 and 4090, for which",
        "  no figures were found.",
        "- **sustained**: the same, and a factor for all operators within a training, fitted to these rows without",
        "  llm-foundry's on the H100: one for the A100 with NVLink, one for all other cards. `autotune plan` has this.",
        "",
        *summary(rows),
        "",
        f"Of {total} pairs of GPUs on one training whose measured speeds differ by 5 % or more, {right} are predicted",
        "in the right order.",
        "",
        *held(rows),
        "",
        "The median error of a publisher with the factor of the others' tables, a multiple of the catalogue's:",
        "",
        *(f"- {name}: x {factor:.2f}, {error:.1%}" for name, factor, error in without_their_own(rows)),
        "",
        "Wanted were, in the median over tables and in the 90th percentile:",
        "",
        *reached(rows),
        "",
        "llm-foundry's rows are predicted as its benchmark ran them: FlashAttention 1 in Triton, a fused loss, two",
        "metrics of all logits after each micro-batch, and the copies of FSDP (`benchmarks/published/shapes.py`).",
        "Nothing was fitted to its H100 tables. For that kernel's rate on an H100 no figures were found: it is taken",
        "to be as much slower than FlashAttention 2 as on an A100.",
        *of_a_fast_host(rows),
        "Lit-GPT's rows ran its own code (`published.md`) on rows of Alpaca, whose lengths are assumed: 120, 170 and",
        "220 tokens for the longest of 1, 2 and 4. Its loop also wrote a log to a file after each micro-batch.",
        "Its rows with nested quantisation were at first up to 58 % too slow. So the operator that expands quantised",
        "scales takes the host's time of a single kernel since, in place of a 4-bit module's.",
        "",
    ]
    for table, found in tables(rows).items():
        lines += [f"## {table}", "", "| row | GPU | measured | predicted | error |", "|---|---|--:|--:|--:|"]
        for each in found:
            seconds = each.seconds["sustained"]
            cells = f"{each.row.seconds:.4g} s | {seconds:.4g} s | {each.error('sustained'):+.1%}"
            lines.append(f"| {each.row.name} | {each.row.gpus} x {each.row.gpu} | {cells} |")
        lines.append("")
    lines += ["## Not predicted", ""]
    lines += [f"- {row.table}: {row.name} ({row.kind}, {row.gpu})" for row in left_out]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Predict all rows and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="tables whose names begin so; the page is printed, not written")
    only = parser.parse_args().only
    if not only and find_spec("lit_gpt") is None:
        parser.error("the rows of Lit-GPT need lit_gpt and lightning on PYTHONPATH (see published.md)")
    with DATA.open(encoding="utf-8", newline="") as file:
        rows = [published(row) for row in csv.DictReader(file) if row["source"].startswith(only)]
    found = {row: predicted(row) for row in rows if row.kind == "main"}
    text = page([each for each in found.values() if each], [row for row in rows if not found.get(row)])
    if only:
        print(text)
    else:
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
