"""How far estimates from traces at other sizes are from those at a candidate's own, by trainer and length of the rows.

Run ``python -m benchmarks.plan.own_sizes [--trainer dpo] [--gpu cpu]``; it makes rows of up to 420, 1,100 or 4,600
tokens, draws candidates of the whole default space by chance, no two of which train in the same way, estimates each
both ways, and prints a Markdown table. No GPU is needed.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from autotune.app.options import checked_options
from autotune.app.planned import planned_machine, planned_workload
from autotune.app.problem import global_batch_of, problem_of
from autotune.app.requests import traces_of
from autotune.core.candidate import Candidate
from autotune.core.estimate import Estimate, Origin
from autotune.core.events import ignore
from autotune.inspection.dataset import dataset_source
from autotune.inspection.model import model_source
from autotune.planning.candidates import estimated_candidates
from autotune.planning.planner import Planner
from autotune.planning.target import Accelerator
from autotune.planning.tracing.cache import Cache
from autotune.probing.tracing import ServerTracer
from autotune.units import format_bytes
from benchmarks.shapes import LETTER, LLAMA_8B, write_model

_SEED = 5
_ROWS = 300
_TRAINERS = ("sft", "dpo", "kto", "reward", "grpo")
_LONGEST = (420, 1100, 4600)
_LLAMA_13M: Mapping[str, Any] = {
    **LLAMA_8B, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 32000, "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip
_OPTIONS: Mapping[str, dict[str, Any]] = {"grpo": {"completion_length": 256}}


@dataclass(frozen=True)
class Compared:
    """A candidate as its technique combination foretells it, and as it is at its own sizes."""

    trainer: str
    longest: int
    choices: str
    traced_tokens: float
    extrapolated_bytes: int
    own_bytes: int

    @property
    def error(self) -> float:
        """Share by which the extrapolated memory is off."""
        return self.extrapolated_bytes / self.own_bytes - 1


def main() -> None:
    """Estimate both ways, and print how they compare."""
    parser = argparse.ArgumentParser(description="Traces at other sizes against those at a candidate's own.")
    parser.add_argument("--gpu", default="RTX4090")
    parser.add_argument("--trainer", choices=_TRAINERS, action="append")
    parser.add_argument("--longest", type=int, action="append")
    parser.add_argument("--samples", type=int, default=10)
    asked = parser.parse_args()
    print("| trainer | rows up to | longest traced row | own sizes | extrapolated, off by | choices |")
    print("|---|--:|--:|--:|--:|---|", flush=True)
    found: list[Compared] = []
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_model(Path(folder, "model"), _LLAMA_13M))
        for trainer in asked.trainer or _TRAINERS:
            for longest in asked.longest or _LONGEST:
                place = Path(folder, f"{trainer}-{longest}")
                of_case = list(_compared(place, model, trainer, longest, asked.gpu, asked.samples))
                for compared in of_case:
                    print(_line(compared), flush=True)
                found += of_case
    print()
    for longest in dict.fromkeys(compared.longest for compared in found):
        errors = [compared.error for compared in found if compared.longest == longest]
        sizes = [abs(error) for error in errors]
        print(f"Rows up to {longest:,}: {len(errors)} candidates, off by {median(sizes):.1%} in the median, from "
              f"{min(errors):+.1%} to {max(errors):+.1%}", flush=True)  # fmt: skip


def _compared(folder: Path, model: str, trainer: str, longest: int, gpu: str, samples: int) -> Iterator[Compared]:
    folder.mkdir()
    planned = planned_machine(gpu)
    options = checked_options(trainer=trainer, **_OPTIONS.get(trainer, {}))
    batch = global_batch_of(options, planned.machine)
    with ServerTracer(planned.cores, ignore) as tracer:
        cache = Cache(folder / "cache")
        rows = dataset_source(str(_written(folder / "rows.jsonl", trainer, longest)))
        workload = planned_workload(options, model_source(model, "random"), rows, tracer, cache, ignore)
        problem = problem_of(options, workload, planned.machine, batch)
        candidates = estimated_candidates(problem)
        target = Accelerator(planned.gpu, planned.machine.hardware.memory_bytes)
        traces = traces_of(workload, planned.machine, tracer, cache)
        planner = Planner(problem, target, traces, workload.model.layer_kinds, candidates)
        drawn = _drawn(planner, candidates, samples)
        once = iter((True,))
        planner.refine(lambda _: map(planner.estimate, drawn), len(drawn), goes_on=lambda: next(once, False))
        before = [(planner.estimate(each), planner.figures.basis(each)) for each in drawn]
        planner.trace(drawn)
        for (estimate, basis), own in zip(before, map(planner.estimate, drawn), strict=True):
            if estimate.origin is Origin.EXTRAPOLATED and own.origin is Origin.TRACED:
                traced_tokens = basis.terms[0].fit.longest
                differs = own.candidate.differences(problem.baseline)
                words = ", ".join(f"{knob}={choice}" for knob, choice in own.candidate.items() if knob in differs)
                yield Compared(trainer, longest, words, traced_tokens, _bytes(estimate), _bytes(own))


def _bytes(estimate: Estimate) -> int:
    assert estimate.memory is not None
    return estimate.memory.device_bytes


def _drawn(planner: Planner, candidates: Sequence[Candidate], samples: int) -> list[Candidate]:
    by_group = {planner.group(each): each for each in random.Random(_SEED).sample(candidates, len(candidates))}
    return list(by_group.values())[:samples]


def _written(file: Path, trainer: str, longest: int) -> Path:
    """Write rows of log-normal lengths, one of them the longest."""
    chance = random.Random(_SEED)
    lengths = [min(longest, int(chance.lognormvariate(0, 0.9) * longest / 16) + 16) for _ in range(_ROWS - 1)]
    with file.open("w", encoding="utf-8") as lines:
        for number, tokens in enumerate((longest, *lengths)):
            prompt, answer = tokens // 4, tokens - tokens // 4
            less = max(1, round(answer * chance.uniform(0.5, 1)))
            lines.write(json.dumps(_row(trainer, prompt, answer, less, good=number % 2 == 0)) + "\n")
    return file


def _row(trainer: str, prompt: int, answer: int, less: int, *, good: bool) -> dict[str, object]:
    if trainer == "sft":
        return {"text": LETTER * (prompt + answer)}
    if trainer == "grpo":
        return {"prompt": LETTER * (prompt + answer)}
    if trainer == "kto":
        return {"prompt": LETTER * prompt, "completion": LETTER * answer, "label": good}
    return {"prompt": LETTER * prompt, "chosen": LETTER * answer, "rejected": LETTER * less}


def _line(compared: Compared) -> str:
    return (
        f"| {compared.trainer} | {compared.longest:,} | {compared.traced_tokens:,.0f} | "
        f"{format_bytes(compared.own_bytes)} | {compared.error:+.1%} | {compared.choices} |"
    )


if __name__ == "__main__":
    main()
