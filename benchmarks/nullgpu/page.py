"""The comparison as a page of Markdown: every row, the distribution of errors, and rows with larger ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from autotune.core.program import CONSTRUCTION
from autotune.units import plural
from benchmarks.gpu.accuracy import Pair, spread
from benchmarks.nullgpu.cases import Case

Row = Mapping[str, Any]
FIGURES = ("allocated", "reserved")
MEDIAN = {"allocated": 0.0005, "reserved": 0.01}
PERCENTILE_95 = {"reserved": 0.03}
WORST = {"allocated": 0.005, "reserved": 0.05}
"""The goal, by figure: shares of what was measured."""
_MIB = 1 << 20

_ABOUT = """\
Each candidate is traced whole, at its own sizes and depth (`autotune/step/jobs/trace.py`), and trained with TRL on
null GPUs (`autotune/step/jobs/probe.py`; [what a null GPU is](../../autotune/nullgpu/README.md)): PyTorch's CUDA
build, whose caching allocator counts. Allocated and reserved bytes are the peaks of a process; with several ranks, of
the one that needs the most. Errors are those of the trace: negative where it has too little.

Where completions are generated, a trace has the generation for two micro-batches. Generations of the size of a plan's
are compared in [many.md](../plan/many.md).

With ZeRO-2, the first rank is traced, the last, and the one that holds the largest share of the gradients by
DeepSpeed's partition; the one counts that reserves the most. Of a run, each figure is the largest of any rank: with
GRPO, another rank allocates 24 MiB more in the memory that it has reserved.

What is left in most rows, 0.01 to 0.03 %, are the tensors of a batch: accelerate's loader has those of all
micro-batches of a step on the device, and a trace has them one after another.

Rows with images are of small models of two families, one to three images in a row. Qwen's processors need torchvision,
which is not installed here, and Idefics 3 leaves out images of which all numbers are zero, as they are on a null GPU.

`results.jsonl` has a hash of the sources that each trace and each run is of. Traces of the trainers that generate,
and of KTO, changed after they were compared here.

Reserved memory of a run is not always the same: transformers places random weights in the order of a set of names,
which is another one in each process. Over 40 orders, the trace of KTO on Mixtral reserves 974 MiB (22), 976 (7) or
1,050 (11), and three runs had 1,050, 1,050 and 1,006. Here, all processes have the same order (`PYTHONHASHSEED=0`).

With DDP, runs wait 0.3 s after each optimizer step. DDP builds its buckets of gradients anew in the second step, and
NCCL's watchdog, which looks every 100 ms, holds the old ones until it has seen that their collectives ended. Steps that
follow sooner have the peak with both: up to 8 % more allocated and 20 % more reserved memory in these cases, which a
trace does not count. Real GPUs were not looked at."""

_NOT = """\
## What a null GPU cannot say

- Speed: kernels do nothing.
- Numerics: losses and gradients are whatever was in memory, and a program that branches on them goes a way of its own.
- Workspaces of cuDNN's engines: they are not published, and neither a trace nor a null GPU counts them. Both have what
  cuDNN's frontend adds, which is part of PyTorch. On an H100, where attention is cuDNN's, an engine may also store the
  gradients of keys and values for each query head, where several query heads share a key. For 8 rows of 512 tokens and
  8 heads of 64 elements in bfloat16, they would be 4 MiB each, in the backward pass of one layer at a time.
- NCCL's buffers: none are allocated.
- The size of the context, and what the driver keeps: figures of a table (`autotune/inspection/gpus.yaml`), which are
  data and no result; they are in no figure of this page.
- vLLM: it does not run there.
- Fragmentation in the driver, and memory that a kernel takes by itself.
- Outliers of inputs: a product with weights of 8 bits keeps a copy of their columns. A null GPU has none, and traces
  of this page counted all columns; later ones count half. An H100 was between the two (`benchmarks/gpu/results`)."""


def page(cases: Sequence[Case], rows: Mapping[str, Row], about: Mapping[str, str]) -> str:
    """Return the page.

    Args:
        cases: all of them, in order.
        rows: what is known, by the name of the case.
        about: what was installed, by name.
    """
    known = [(case, rows[case.name]) for case in cases if case.name in rows]
    compared = [(case, row) for case, row in known if _pair(row, "reserved") is not None]
    software = ", ".join(f"{name} {version}" for name, version in about.items())
    parts = [
        "# Traces against training on null GPUs",
        f"`python -m benchmarks.nullgpu`, {software}. {len(cases)} cases, {len(compared)} of them traced and run.",
        _ABOUT,
        "## All\n\n" + "\n".join(_all(compared)),
        "## Exceptions\n\n" + "\n".join(_exceptions(compared)),
        "## Not compared\n\n" + ("\n".join(_absent(cases, rows)) or "Every case is traced and run."),
        _NOT,
        "## By group\n\n" + "\n".join(_groups(compared)),
        "## By phase\n\n" + "\n".join(_phases(compared)),
        "## Every row\n\n" + "\n".join(_rows(compared)),
    ]
    return "\n\n".join(parts) + "\n"


def summary(cases: Sequence[Case], rows: Mapping[str, Row]) -> str:
    """Return the figures in a sentence, as docs/accuracy.md has them."""
    compared = [(case, rows[case.name]) for case in cases if _pair(rows.get(case.name, {}), "reserved") is not None]
    found = {figure: spread(errors(compared, figure)) for figure in FIGURES}
    allocated, reserved = found["allocated"], found["reserved"]
    assert allocated is not None
    assert reserved is not None
    return (
        f"Of {len(compared)} candidates that were traced whole and trained on null GPUs, half are within "
        f"{allocated.median:.2%} in allocated and {reserved.median:.2%} in reserved memory, 95 % within "
        f"{allocated.percentile_95:.2%} and {reserved.percentile_95:.2%}; the worst are {allocated.worst:+.1%} and "
        f"{reserved.worst:+.1%} off"
    )


def _pair(row: Row, figure: str) -> Pair | None:
    traced, measured = (row.get(what, {}).get(figure) for what in ("traced", "measured"))
    return None if traced is None or measured is None else Pair(traced, measured, math.inf)


def errors(compared: Iterable[tuple[Case, Row]], figure: str) -> list[Pair]:
    """Return the pairs of a figure."""
    return [pair for _, row in compared if (pair := _pair(row, figure)) is not None]


def is_exception(row: Row) -> bool:
    """Return whether a row is off by more than the worst that is aimed at."""
    return any(abs(pair.error) > WORST[figure] for figure in FIGURES if (pair := _pair(row, figure)) is not None)


def _all(compared: Sequence[tuple[Case, Row]]) -> Iterator[str]:
    exceptions = [case for case, row in compared if is_exception(row)]
    yield "| figure | rows | median | 95th percentile | worst | goal: median | 95th percentile | worst row |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|"
    for figure in FIGURES:
        found = spread(errors(compared, figure))
        if found is not None:
            goals = (_share(each.get(figure)) for each in (MEDIAN, PERCENTILE_95, WORST))
            yield (
                f"| {figure} | {found.count} | {found.median:.3%} | {found.percentile_95:.2%} | {found.worst:+.2%} | "
                + " | ".join(goals)
                + " |"
            )
    if compared:
        share = len(exceptions) / len(compared)
        yield ""
        count = plural(len(exceptions), "row")
        yield f"Exceptions: {count} ({share:.1%}); the goal is at most 5 %, and none above 10 %."


def _exceptions(compared: Sequence[tuple[Case, Row]]) -> Iterator[str]:
    exceptions = [(case, row) for case, row in compared if is_exception(row)]
    if not exceptions:
        yield "None."
        return
    yield "| case | allocated | reserved |"
    yield "|---|--:|--:|"
    for case, row in exceptions:
        yield f"| {case.name} | {_error(row, 'allocated')} | {_error(row, 'reserved')} |"


def _absent(cases: Sequence[Case], rows: Mapping[str, Row]) -> Iterator[str]:
    left = 0
    for case in cases:
        row = rows.get(case.name, {})
        failed = [what for what in ("traced", "measured") if "reason" in row.get(what, {})]
        reasons = [f"{what}: {_first(row[what]['reason'])}" for what in failed]
        if failed:
            yield f"- {case.name}: {'; '.join(reasons)}"
        elif _pair(row, "reserved") is None:
            left += 1
    if left:
        yield f"- {left} cases have not been traced and run yet; the command goes on with them."


def _groups(compared: Sequence[tuple[Case, Row]]) -> Iterator[str]:
    yield "| group | rows | allocated: median | worst | reserved: median | 95th percentile | worst |"
    yield "|---|--:|--:|--:|--:|--:|--:|"
    for name, members in _grouped(compared).items():
        allocated, reserved = (spread(errors(members, figure)) for figure in FIGURES)
        if allocated is not None and reserved is not None:
            yield (
                f"| {name} | {allocated.count} | {allocated.median:.3%} | {allocated.worst:+.2%} "
                f"| {reserved.median:.2%} | {reserved.percentile_95:.2%} | {reserved.worst:+.2%} |"
            )


def _grouped(compared: Sequence[tuple[Case, Row]]) -> Mapping[str, list[tuple[Case, Row]]]:
    found: dict[str, list[tuple[Case, Row]]] = {}
    for case, row in compared:
        names = [f"trainer {case.trainer}", f"model {case.model}", case.gpu, f"{case.processes} ranks"]
        names += [f"{knob}={choice}" for knob, choice in case.choices.items()]
        longest = max(case.lengths)
        names.append(
            "rows up to 1,024" if longest <= 1024 else "rows up to 4,096" if longest <= 4096 else "longer rows"
        )
        for name in names:
            found.setdefault(name, []).append((case, row))
    return dict(sorted(found.items(), key=lambda item: item[0].split()[0] not in ("trainer", "model")))


def _phases(compared: Sequence[tuple[Case, Row]]) -> Iterator[str]:
    yield (
        "The highest level of allocated bytes in each phase that both have. A trace has a phase's tensors; what the\n"
        "allocator adds by rounding, and cuBLAS's workspaces, are taken to be the same in every phase. Construction,\n"
        "before the first product, is left out."
    )
    yield ""
    yield "| phase | rows | median | 95th percentile | worst |"
    yield "|---|--:|--:|--:|--:|"
    found: dict[str, list[Pair]] = {}
    for _, row in compared:
        traced, measured = (row[what]["peaks"] for what in ("traced", "measured"))
        for phase in measured:
            if phase in traced and phase != CONSTRUCTION and measured[phase]:
                found.setdefault(phase, []).append(Pair(traced[phase], measured[phase], math.inf))
    for phase, pairs in found.items():
        shown = spread(pairs)
        if shown is not None:
            yield f"| {phase} | {shown.count} | {shown.median:.3%} | {shown.percentile_95:.2%} | {shown.worst:+.2%} |"


def _rows(compared: Sequence[tuple[Case, Row]]) -> Iterator[str]:
    yield "In MiB."
    yield ""
    yield "| case | allocated: traced | run | error | reserved: traced | run | error |"
    yield "|---|--:|--:|--:|--:|--:|--:|"
    for case, row in compared:
        cells = [cell for figure in FIGURES for cell in _cells(row, figure)]
        yield f"| {case.name} | {' | '.join(cells)} |"


def _cells(row: Row, figure: str) -> Iterator[str]:
    pair = _pair(row, figure)
    assert pair is not None
    yield from (f"{pair.predicted / _MIB:,.1f}", f"{pair.measured / _MIB:,.1f}", f"{pair.error:+.2%}")


def _error(row: Row, figure: str) -> str:
    pair = _pair(row, figure)
    return "" if pair is None else f"{pair.error:+.2%}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value * 100:g} %"


def _first(reason: str) -> str:
    return reason.strip().splitlines()[0].replace("|", "/")[:240]
