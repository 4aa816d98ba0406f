"""Traces the training loops of public tables of measured memory; one error for each row.

    python -m benchmarks.published metamathqa           # PEFT's method comparison
    python -m benchmarks.published litgpt               # Lit-GPT's resource table, with its own code
    python -m benchmarks.published xmem                 # xMem's runs, with what four estimators said
    python -m benchmarks.published fms                  # several GPUs, as are fsdp2, swift, and torchtitan
    python -m benchmarks.published reports              # what publishers of recipes report, on one GPU and on two
    python -m benchmarks.published metamathqa --only lora/    # rows whose names begin so
    python -m benchmarks.published metamathqa --skip boft/llama-3.2-3B-default      # it takes as long as all others

It prints Markdown; the committed results are in `published.md`, `ranks.md` and `reports.md`. What software is traced is
what can be imported: the published versions go before the installed ones on PYTHONPATH (`pip install --no-deps
--target`). Lit-GPT needs its own checkout there, and lightning, lightning-utilities and torchmetrics; torchtitan its
own checkout.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

from benchmarks.published.outcomes import LOOPS, outcomes_of
from benchmarks.published.render import rendered
from benchmarks.published.rivals import rivals_rendered
from benchmarks.published.tables import Outcome, load

_OF_TRL = ("torch", "transformers", "trl", "accelerate", "peft", "deepspeed")
_TRACED_WITH = {
    **dict.fromkeys(("metamathqa", "litgpt"), ("torch", "transformers", "peft", "bitsandbytes")),
    "xmem": ("torch", "transformers"),
    "torchtitan": ("torch",),
    **dict.fromkeys(("fms", "fsdp2"), _OF_TRL[:-1]),
    "reports": (*_OF_TRL[:-1], "bitsandbytes"),
    "swift": _OF_TRL,
}


def main() -> None:
    """Trace the rows of the chosen table and print them."""
    parser = argparse.ArgumentParser(description="Traced against published memory.")
    parser.add_argument("table", choices=LOOPS)
    parser.add_argument("--only", default="", metavar="PREFIX", help="rows whose names begin so")
    parser.add_argument("--skip", action="append", default=[], metavar="NAME", help="a row that is not traced")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    name = arguments.table
    table = load(name)
    rows = [row for row in table.rows if row.name.startswith(arguments.only)]
    traced = [row for row in rows if row.name not in arguments.skip]
    outcomes = {row.name: Outcome(failure="left out of this run: it takes too long") for row in rows}
    for row, outcome in zip(traced, outcomes_of(name, table, traced, arguments.workers), strict=True):
        outcomes[row.name] = outcome
        print(f"{row.name}: {outcome}", file=sys.stderr, flush=True)
    traced_with = _TRACED_WITH[name]
    versions = ", ".join(f"{package} {import_module(package).__version__}" for package in traced_with)
    if name == "litgpt":
        checkout = Path(import_module("lit_gpt").__path__[0]).parent
        versions += f", Lit-GPT from the folder {checkout.name}"
    render = rivals_rendered if name == "xmem" else rendered
    print(render(table, [(row, outcomes[row.name]) for row in rows], versions))


if __name__ == "__main__":
    main()
