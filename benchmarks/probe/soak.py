"""Do recommended configurations train to their end, within the budget and at the rate that they were found for?

python -m benchmarks.probe.soak [--only WORD …] [--page]

Each case searches with ``autotune probe`` under a budget below what TRL's default needs. Then the bundle's ``train.py``
runs 200 steps unchanged, with evaluations and saves. What ``soak.jsonl`` has is not run again.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import autotune
from autotune.core.result import Choosable
from autotune.units import format_bytes
from benchmarks.probe.real_run import RealRun, real_run

FOLDER = Path(__file__).parent
STEPS = 200
_EVERY = STEPS // 2
"""Steps between two evaluations, and between two saves. The rate is that of the steps before the first."""
_SETTLING_STEPS = 10
_EVALUATED_ROWS = 40
_JOINED_ROWS = 8
_TENTH = 10
_ERROR = re.compile(r"[\w.]+(Error|Exception|Interrupt)\b")
_SIZES: Mapping[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
_ANSWERS = {"fix": {"max_completion_length": 32, "num_generations": 4}, "reward_funcs": ["examples.rewards.brevity"]}
_ABOUT = f"""\
# Recommended configurations, trained

`python -m benchmarks.probe.soak`: each case is searched by `autotune probe --effort quick` on a CPU, under a budget
below what TRL's default needs. Then the bundle's `train.py` trains {STEPS} steps unchanged, with an evaluation and a
save every {_EVERY}. Rows are pages of Python's documentation; "long" joins every tenth with the
{_JOINED_ROWS - 1} after it. The rate is that of the steps before the first evaluation, without the first
{_SETTLING_STEPS}; "promised" is the 95 % range of a further run. Memory is resident memory above
the imports. The training runs under no limit, and its peak is held against the budget: `RLIMIT_DATA`, by which a probe
is limited, also counts what is allocated and never touched.

Where a search ended without a recommendation, its budget or its limit of time was raised and it was run again. Smaller
micro-batches of KTO change training and were not allowed, so that few candidates need less than TRL's default: on long
rows nothing fitted in 1,200 MiB, and 2,000 MiB hold the default, too.
"""


@dataclass(frozen=True)
class Case:
    """What is searched and trained.

    Attributes:
        budget: of memory.
        family: transformers' type of the model.
        long: whether the rows have a tail of long ones.
        options: further arguments of :func:`autotune.probe`.
    """

    trainer: str
    family: str
    budget: str
    long: bool = False
    options: Mapping[str, Any] | None = None

    @property
    def name(self) -> str:
        """A name of its own."""
        allowed = "".join(f" with {knob}" for knob in (self.options or {}).get("allow", ()))
        return f"{self.trainer} {self.family}{', long' if self.long else ''}{allowed}"


CASES: Sequence[Case] = (
    Case("sft", "llama", "250MiB"),
    Case("sft", "qwen3", "500MiB", long=True),
    Case("sft", "gemma3_text", "400MiB"),
    Case("sft", "llama", "400MiB", long=True, options={"allow": ["lora"]}),
    Case("dpo", "llama", "400MiB"),
    Case("dpo", "qwen3", "800MiB", long=True),
    Case("dpo", "gemma3_text", "700MiB", options={"allow": ["lora"]}),
    Case("kto", "llama", "660MiB"),
    Case("kto", "qwen3", "2000MiB", long=True),
    Case("reward", "llama", "250MiB"),
    Case("reward", "qwen3", "500MiB", long=True),
    Case("grpo", "llama", "300MiB", options=_ANSWERS),
    Case("grpo", "gemma3_text", "300MiB", options=_ANSWERS),
    Case("rloo", "qwen3", "300MiB", options=_ANSWERS),
    Case("distillation", "llama", "300MiB", options={"fix": {"max_completion_length": 32}}),
)


def main() -> int:
    """Search and train what the file does not have yet, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="WORD", help="cases whose name has one of these words")
    parser.add_argument("--page", action="store_true", help="only write the page from the file")
    asked = parser.parse_args()
    file = FOLDER / "soak.jsonl"
    done = {row["case"] for row in read(file)}
    wanted = [case for case in CASES if not asked.only or any(word in case.name for word in asked.only)]
    with file.open("a", encoding="utf-8") as lines:
        for case in () if asked.page else (case for case in wanted if case.name not in done):
            with tempfile.TemporaryDirectory(prefix="autotune-") as folder:
                row = run(case, Path(folder))
            print(json.dumps(row), flush=True)
            lines.write(json.dumps(row) + "\n")
            lines.flush()
    FOLDER.joinpath("soak.md").write_text(page(read(file)), encoding="utf-8")
    return 0


def run(case: Case, folder: Path) -> dict[str, Any]:
    """Search, train, and return the row of a case."""
    model, rows, evaluated = workload(case, folder)
    teacher: dict[str, Any] = {"teacher": folder / "teacher"} if case.trainer == "distillation" else {}
    found = autotune.probe(
        model,
        rows,
        trainer=case.trainer,
        eval_dataset=evaluated,
        memory_budget=case.budget,
        effort="quick",
        timeout="300s",
        output=folder / "bundle",
        **teacher,
        **(case.options or {}),
    ).document
    chosen, default = found.recommended, found.baseline
    row = {"case": case.name, "budget": case.budget, "budget_bytes": found.budget_bytes}
    row |= {"status": found.status, "hardware": found.hardware.name}
    if chosen is None:
        return row
    options = {"max_steps": STEPS, "eval_strategy": "steps", "eval_steps": _EVERY, "save_steps": _EVERY}
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
        },
        "real": {"code": trained.code, "peak": trained.peak_bytes, "rate": rate_of(trained, chosen)},
        "error": next((line for line in reversed(trained.errors) if _ERROR.match(line)), "") if trained.code else "",
    }


def workload(case: Case, folder: Path) -> tuple[Path, Path, Path]:
    """Write rows, a tokenizer and a model; return the model, the rows to train on and those to evaluate."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    script = FOLDER.parents[1] / "examples" / "small_workload.py"
    words = [sys.executable, str(script), str(folder), "--trainer", case.trainer]
    subprocess.run(words, stdout=subprocess.DEVNULL, check=True)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokens = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = AutoConfig.for_model(case.family, vocab_size=len(tokenizer), **_SIZES, **tokens)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    rows = [json.loads(line) for line in (folder / "data.jsonl").read_text(encoding="utf-8").splitlines()]
    if case.long:
        rows = [
            joined(rows[place : place + _JOINED_ROWS]) if place % 10 == 0 else row for place, row in enumerate(rows)
        ]
    parts = {"train": rows[:-_EVALUATED_ROWS], "test": rows[-_EVALUATED_ROWS:]}
    for name, part in parts.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
    return folder / "model", folder / "train.jsonl", folder / "test.jsonl"


def joined(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the first row with the texts of all: the prompt is its own."""
    return {
        name: "\n".join(str(row[name]) for row in rows) if isinstance(value, str) and name != "prompt" else value
        for name, value in rows[0].items()
    }


def rate_of(trained: RealRun, chosen: Choosable) -> float | None:
    """Return the tokens per second of the steps before the first evaluation; None if there are too few."""
    ends = [at for at, line in trained.lines if "'loss':" in line][_SETTLING_STEPS:_EVERY]
    if len(ends) < _SETTLING_STEPS or chosen.tokens_per_step is None:
        return None
    return (len(ends) - 1) * chosen.tokens_per_step / (ends[-1] - ends[0])


def differing(chosen: Choosable, default: Choosable | None) -> dict[str, str | int]:
    """Return the choices that TRL's default does not make."""
    return {
        knob: choice
        for knob, choice in chosen.candidate.items()
        if default is None or choice != default.candidate[knob]
    }


def _outcome(default: Choosable | None) -> str:
    return str(default.status) if default is not None else "none"


def read(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a file, or none if there is no file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the page."""
    ended = [row for row in rows if "real" in row]
    trained = [row for row in ended if not row["real"]["code"]]
    ranged = [row for row in trained if row["promised"]["low"] is not None and row["real"]["rate"] is not None]
    within = [row for row in ranged if row["promised"]["low"] <= row["real"]["rate"] <= row["promised"]["high"]]
    widths = [row["promised"]["high"] / row["promised"]["rate"] - 1 for row in ranged]
    summary = (
        f"{len(rows)} of {len(CASES)} cases have been run, on {', '.join(sorted({row['hardware'] for row in rows}))}. "
        f"{len(ended)} have a recommendation, {len(trained)} of these trained to their end, and "
        f"{sum(map(_fits, trained))} of these within the budget. "
        f"{len(within)} of {len(ranged)} rates are within the promised range, whose upper end is "
        f"{median(widths) if widths else 0:.0%} above the promised rate in the median.\n"
    )
    text = [
        _ABOUT,
        summary,
        "| case | budget | TRL's default | differs in | promised peak | real peak | promised, tok/s | real, tok/s |",
        "|---|--:|---|---|--:|--:|--:|--:|",
        *map(_line, rows),
    ]
    return "\n".join(text) + "\n"


def _fits(row: Mapping[str, Any]) -> bool:
    return bool(row["real"]["peak"] <= row["budget_bytes"])


def _line(row: Mapping[str, Any]) -> str:
    if "real" not in row:
        return f"| {row['case']} | {row['budget']} | | **{row['status']}** | | | | |"
    promised, real = row["promised"], row["real"]
    differs = " ".join(f"{knob}={choice}" for knob, choice in row["differs"].items())
    span = "no range" if promised["low"] is None else f"{promised['low']:,.0f} to {promised['high']:,.0f}"
    ended = f"**exit status {real['code']}**" if real["code"] else format_bytes(real["peak"])
    ended = ended if real["code"] or _fits(row) else f"**{ended}**"
    rate = "" if real["rate"] is None else f"{real['rate']:,.0f}"
    peak = format_bytes(promised["peak"])
    return f"| {row['case']} | {row['budget']} | {row['default']} | {differs} | {peak} | {ended} | {span} | {rate} |"


if __name__ == "__main__":
    sys.exit(main())
