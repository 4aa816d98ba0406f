"""Trains recommended configurations for many steps: do they stay within the budget and the promised speed?

python -m benchmarks.probe.soak [--only WORD …] [--page]

Each case searches with ``autotune probe`` under a budget below what TRL's default needs, or near it. Then the bundle's
``train.py`` runs 200 steps unchanged, with evaluations and saves. What ``soak.jsonl`` has is not run again.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import autotune
from autotune.core.documents.result import MeasuredCandidate
from autotune.core.spread import Interval, for_later_run
from autotune.units import format_bytes
from benchmarks.common import chosen, read_rows
from benchmarks.probe.real_run import RealRun, real_run
from benchmarks.probe.soak_cases import CASES, JOINED_ROWS, Case, workload

FOLDER = Path(__file__).parent
STEPS = 200
_EVERY = STEPS // 2
"""Steps between two evaluations, and between two saves. The rate is that of the steps before the first."""
_SETTLING_STEPS = 10
_SHARED = "dpo mistral, code"
_AGAIN = 14
"""The first cases, which were searched and trained again after malloc was set to keep what a step frees."""
_ERROR = re.compile(r"[\w.]+(Error|Exception|Interrupt)\b")
_ABOUT = f"""\
# Recommended configurations, trained

`python -m benchmarks.probe.soak`: each case is searched by `autotune probe --effort quick` on a CPU, under a budget
below what TRL's default needs, or near it. Then the bundle's `train.py` trains {STEPS} steps unchanged, with an
evaluation and a save every {_EVERY}. Rows are pages of Python's documentation; "long" joins every tenth with the
{JOINED_ROWS - 1} after it, "short" has their first lines, "chat" is conversations of one to five questions about
them, and "code" is the source of Python's functions instead. The rate is that of the steps before
the first evaluation, without the first {_SETTLING_STEPS}; where the reference is precomputed, each step takes its share
of that pass, which is spread over the epochs. "promised" is the 95 % range of a later run. It follows from the winner's
own runs; since 29 November, the scatter of TRL's default widens it, where that runs; since 30 November, so does the
difference between runs at different times, which was fitted to this table (`autotune/core/spread.py`). That widening
alone is added here to the ranges of searches before.
Memory is resident memory above the imports. The training runs under no limit, and its peak is held against the budget:
`RLIMIT_DATA`, by which a probe is limited, also counts what is allocated and never touched. The peak is read ten times
a second; "about": it was read at the end, when other pages of files may have been resident than at the peak.

A model with a vision tower is smaller than the others, and each row has one image or two of random pixels. Completions
are expected to have 32 tokens, all that they may have, since models of random weights hardly ever end one. TRL's
OnlineDPOTrainer cannot evaluate.

Where a search ended without a recommendation, its budget or its limit of time was raised and it was run again. Smaller
micro-batches of KTO change training and were not allowed, so that few candidates need less than TRL's default: on long
rows nothing fitted in 1,200 MiB, and 2,000 MiB hold the default, too. "{_SHARED}" shared its cores with another case.
"distillation qwen2 on 2 ranks" was run twice: the first time it trained, evaluated and saved, and one rank did not
exit. As the interpreter ended, PyTorch's Gloo joined a thread that waited for the GIL
(https://github.com/pytorch/pytorch/issues/56297).

Resident memory grows while rows of many lengths are trained on: glibc's malloc keeps pieces of freed memory that no
later tensor fits into. In another run of "{_SHARED}", mallinfo2 had 350 MiB in use at most, then as later, while the
resident memory grew from 320 MiB after 9 s to 463 MiB after 75 s, and to 551 MiB by step 100. With
`MALLOC_MMAP_THRESHOLD_=131072` it was 272 MiB at most in 60 steps, which took 45 % longer. It grows faster where oneDNN
has AMX: on a Xeon, "dpo llava_next" in micro-batches of one pair grew to 204 MiB by step 4 and 375 MiB by step 24;
without AMX (`ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16`) to 191 MiB, and with that threshold to 188 MiB. A GPU has PyTorch's
allocator, which the traces and null GPUs follow.
"""


def main() -> int:
    """Search and train the cases that the file lacks, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="WORD", help="cases whose name has one of these words")
    parser.add_argument("--page", action="store_true", help="only write the page from the file")
    asked = parser.parse_args()
    file = FOLDER / "soak.jsonl"
    done = {row["case"] for row in read_rows(file)}
    wanted = chosen(CASES, asked.only)
    with file.open("a", encoding="utf-8") as lines:
        for case in () if asked.page else (case for case in wanted if case.name not in done):
            with tempfile.TemporaryDirectory(prefix="autotune-") as folder:
                row = run(case, Path(folder))
            print(json.dumps(row), flush=True)
            lines.write(json.dumps(row) + "\n")
            lines.flush()
    FOLDER.joinpath("soak.md").write_text(page(read_rows(file)), encoding="utf-8")
    return 0


def run(case: Case, folder: Path) -> dict[str, Any]:
    """Search, train, and return the row of a case."""
    found = autotune.probe(
        **workload(case, folder),
        trainer=case.trainer,
        memory_budget=case.budget,
        effort="quick",
        timeout="300s",
        output=folder / "bundle",
        **case.options,
    ).document
    chosen, default = found.recommended, found.baseline
    row = {"case": case.name, "budget": case.budget, "budget_bytes": found.budget_bytes}
    row |= {"status": found.status, "hardware": found.hardware.name}
    if chosen is None:
        return row
    options: dict[str, Any] = {"max_steps": STEPS, "save_steps": _EVERY}
    if case.evaluates:
        options |= {"eval_strategy": "steps", "eval_steps": _EVERY}
    words = {f"--{name}": str(value) for name, value in options.items()}
    trained = real_run(folder / "bundle" / "train.py", found, words)
    return row | {
        "default": _outcome(default),
        "differs": differing(chosen, default),
        "promised": {
            "peak": chosen.peak_bytes,
            "rate": chosen.tokens_per_second,
            "low": chosen.tokens_per_second_low,
            "high": chosen.tokens_per_second_high,
            "later": True,
        },
        "real": {"code": trained.code, "peak": trained.peak_bytes, "rate": rate_of(trained, chosen), "followed": True},
        "error": next((line for line in reversed(trained.errors) if _ERROR.match(line)), "") if trained.code else "",
    }


def rate_of(trained: RealRun, chosen: MeasuredCandidate) -> float | None:
    """Return the tokens per second of the steps before the first evaluation; None if there are too few.

    As in the promised rate, each step takes its share of the reference's pass over the rows.
    """
    ends = [at for at, line in trained.lines if "'loss':" in line][_SETTLING_STEPS:_EVERY]
    if len(ends) < _SETTLING_STEPS or chosen.tokens_per_step is None or chosen.steps_per_epoch is None:
        return None
    steps = len(ends) - 1
    shared = steps * trained.pass_seconds / (chosen.steps_per_epoch * chosen.plan.epochs)
    return steps * chosen.tokens_per_step / (ends[-1] - ends[0] + shared)


def differing(chosen: MeasuredCandidate, default: MeasuredCandidate | None) -> dict[str, str | int]:
    """Return the choices that TRL's default does not make."""
    return {
        knob: choice
        for knob, choice in chosen.candidate.items()
        if default is None or choice != default.candidate[knob]
    }


def _outcome(default: MeasuredCandidate | None) -> str:
    return str(default.status) if default is not None else "none"


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the page."""
    ended = [row for row in rows if "real" in row]
    trained = [row for row in ended if not row["real"]["code"]]
    ranged = [row for row in trained if row["promised"]["low"] is not None and row["real"]["rate"] is not None]
    ranges = [_range(row["promised"]) for row in ranged]
    within = sum(row["real"]["rate"] in each for row, each in zip(ranged, ranges, strict=True))
    soon = sum(row["promised"]["low"] <= row["real"]["rate"] <= row["promised"]["high"] for row in ranged)
    widths = [each.high / row["promised"]["rate"] - 1 for row, each in zip(ranged, ranges, strict=True)]
    beyond = {row["case"]: row["real"]["peak"] / row["promised"]["peak"] - 1 for row in trained}
    again = {case.name for case in CASES[:_AGAIN]}
    kept, older = ([each for name, each in beyond.items() if (name in again) is new] for new in (True, False))
    summary = (
        f"{len(rows)} of {len(CASES)} cases have been run, on {', '.join(sorted({row['hardware'] for row in rows}))}. "
        f"{len(ended)} have a recommendation, {len(trained)} of these trained to their end, and "
        f"{sum(map(_fits, trained))} of these within the budget. "
        f"{within} of {len(ranged)} rates are within the promised range, whose upper end is "
        f"{median(widths) if widths else 0:.0%} above the promised rate in the median; {soon} are within the ranges as "
        "they were promised. "
        f"Real peaks differ from the promised ones by {min(beyond.values()):+.0%} to {max(beyond.values()):+.0%}, "
        f"{median(beyond.values()):+.0%} in the median: {_median_text(kept)} in the first {_AGAIN} cases of "
        "`soak_cases.py`, which were searched and trained again on 30 November with malloc set to keep what a step "
        f"frees ([probing.md](../../docs/probing.md#on-a-cpu)), and {_median_text(older)} in the others, from before.\n"
    )
    text = [
        _ABOUT,
        summary,
        "| case | budget | TRL's default | differs in | promised peak | real peak | promised, tok/s | real, tok/s |",
        "|---|--:|---|---|--:|--:|--:|--:|",
        *map(_line, rows),
    ]
    return "\n".join(text) + "\n"


def _range(promised: Mapping[str, Any]) -> Interval:
    """Return the range of a later run."""
    found = Interval(promised["low"], promised["high"])
    return found if promised.get("later") else for_later_run(found)


def _median_text(shares: Sequence[float]) -> str:
    return f"{median(shares):+.0%}" if shares else "nothing to compare"


def _fits(row: Mapping[str, Any]) -> bool:
    return bool(row["real"]["peak"] <= row["budget_bytes"])


def _line(row: Mapping[str, Any]) -> str:
    if "real" not in row:
        return f"| {row['case']} | {row['budget']} | | **{row['status']}** | | | | |"
    promised, real = row["promised"], row["real"]
    differs = " ".join(f"{knob}={choice}" for knob, choice in row["differs"].items())
    span = "no range"
    if promised["low"] is not None:
        expected = _range(promised)
        span = f"{expected.low:,.0f} to {expected.high:,.0f}"
    ended = f"**exit status {real['code']}**" if real["code"] else format_bytes(real["peak"])
    ended = ended if real.get("followed") else f"about {ended}"
    ended = ended if real["code"] or _fits(row) else f"**{ended}**"
    rate = "" if real["rate"] is None else f"{real['rate']:,.0f}"
    peak = format_bytes(promised["peak"])
    return f"| {row['case']} | {row['budget']} | {row['default']} | {differs} | {peak} | {ended} | {span} | {rate} |"


if __name__ == "__main__":
    sys.exit(main())
