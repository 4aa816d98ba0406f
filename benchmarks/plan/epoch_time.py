"""The planned time of a step from a few sizes, compared with the mean over all micro-batches of real epochs.

Run ``python -m benchmarks.plan.epoch_time [--trainer kto] [--gpu H100-80GB]``; no GPU is needed. TRL's own data loader
forms the micro-batches, of rows of 50 to 6,000 tokens. A step is traced at each size that comes up, and the mean of
these times is compared with that of the sizes that a plan's geometry chooses, and with the time at one mean size.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from autotune.app.planned import planned_machine
from autotune.core.events import ignore
from autotune.core.machine import Machine
from autotune.core.plan import TrainingPlan
from autotune.core.rows.batch_geometry import BatchGeometry, Layout, Shape, Typical, mean_shape
from autotune.core.setting import Setting
from autotune.core.workload import ModelSource
from autotune.inspection.machine import environment
from autotune.planning.single import PlanTracer, SizedPlan, TracedPlan
from autotune.planning.tracing.cache import Cache
from autotune.planning.tracing.store import Traces
from autotune.probing.tracing import ServerTracer
from autotune.trainers import find_trainer
from benchmarks.shapes import LETTER, LLAMA_8B, write_model
from tests.settings import CPU, problem
from tests.trainers.prepared import Prepared, prepared_rows

_SEED = 5
_MICRO_BATCHES = 64
"""In an epoch, where documents are not packed."""
_IN_STEP = 4
_SHORTEST, _LONGEST, _KINDS = 50, 6000, 16
"""The range of the tokens of rows, and how many lengths there are, so that sizes come up again."""
_LAYERS = 2
_SMALL: Mapping[str, Any] = {
    **LLAMA_8B, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": _LAYERS, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 32000, "max_position_embeddings": 16384, "tie_word_embeddings": True,
}  # fmt: skip
"""What the data loader's trainer is built with; its size changes no micro-batch."""
_TRACED: Mapping[str, Any] = {
    **_SMALL, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 4,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        rows: of a micro-batch.
        epochs: whose micro-batches are counted; one suffices where all epochs have the same tokens in all.
    """

    name: str
    trainer: str
    rows: int
    choices: Mapping[str, str | int] = field(default_factory=dict)
    epochs: int = 1


_RANDOM = 40
CASES = (
    Case("SFT, padded", "sft", 4, epochs=_RANDOM),
    Case("DPO", "dpo", 2, epochs=_RANDOM),
    Case("KTO", "kto", 4),
    Case("reward", "reward", 2, epochs=_RANDOM),
    Case("GRPO", "grpo", 4, {"num_generations": 4, "max_completion_length": 256}, epochs=8),
    Case("SFT, one row", "sft", 1),
    Case("SFT, packed into 2,048", "sft", 2, {"packing": "bfd", "max_length": 2048}),
    Case("SFT, padding-free", "sft", 2, {"padding_free": "on"}),
)


@dataclass(frozen=True)
class Compared:
    """The times of a step in seconds: as planned, at the mean size, and as a mean over all micro-batches."""

    case: Case
    sizes: Sequence[Typical]
    every: Sequence[Typical]
    planned: float
    at_mean: float
    mean: float

    @property
    def error(self) -> float:
        """Share by which the planned time is off."""
        return self.planned / self.mean - 1

    @property
    def error_at_mean(self) -> float:
        """Share by which the time at the mean size is off."""
        return self.at_mean / self.mean - 1


def main() -> None:
    """Compare all cases and print them."""
    parser = argparse.ArgumentParser(description="Planned time of a step against the mean over epochs.")
    parser.add_argument("--gpu", default="H100-80GB")
    parser.add_argument("--trainer", choices=sorted({case.trainer for case in CASES}), action="append")
    parser.add_argument("--cache", type=Path, help="a folder that keeps traces of this source")
    asked = parser.parse_args()
    print(
        "| micro-batches | epochs | distinct sizes | mean time of all | sizes in a plan | off by | at the mean size |"
    )
    print("|---|--:|--:|--:|---|--:|--:|", flush=True)
    found = []
    planned = planned_machine(asked.gpu)
    with tempfile.TemporaryDirectory() as folder, ServerTracer(planned.hardware.cores, ignore) as tracer:
        for number, case in enumerate(CASES):
            if case.trainer in (asked.trainer or {case.trainer}):
                place = Path(folder, str(number))
                found.append(compared(case, place, planned, tracer, asked.cache or place / "cache"))
                print(_line(found[-1]), flush=True)
    for words, errors in (
        ("As planned", [abs(each.error) for each in found]),
        ("At the mean size", [abs(each.error_at_mean) for each in found]),
    ):
        print(f"\n{words}: off by {median(errors):.1%} in the median and {max(errors):.1%} at the worst.")


def compared(case: Case, folder: Path, planned: Machine, tracer: ServerTracer, cache: Path) -> Compared:
    """Return the times of a case.

    Raises:
        RuntimeError: a step cannot be traced.
    """
    trainer = find_trainer(case.trainer)
    count = case.rows * _MICRO_BATCHES
    small = write_model(folder / "small", _SMALL)
    prepared = prepared_rows(trainer, list(_rows(case.trainer, count)), small, folder / "prepared")
    # The data loader is that of a trainer on this machine's CPU, whose micro-batches have the same rows.
    every = _loaded(prepared, _plan(case, replace(prepared.setting, machine=CPU)), case.epochs, folder)

    source = ModelSource(str(write_model(folder / "model", _TRACED)))
    model = replace(prepared.setting.workload.model, layer_kinds=("layer",) * _LAYERS)
    workload = replace(prepared.setting.workload, model_source=source, model=model)
    setting = replace(prepared.setting, machine=planned, workload=workload)
    plan = _plan(case, setting)
    geometry = trainer.geometry(plan, workload.dataset.documents)
    known = Traces(tracer, Cache(cache), str(_TRACED), environment(planned))
    steps = PlanTracer(known, setting, planned.gpu)
    ways = [geometry, _at_mean(geometry), _of(geometry, every)]
    seconds = [_seconds(found) for found in steps.traced([SizedPlan(plan, way) for way in ways], timed=True)]
    return Compared(case, geometry.sizes, every, *seconds)


def _plan(case: Case, setting: Setting) -> TrainingPlan:
    trainer = find_trainer(case.trainer)
    here = replace(setting, global_batch_size=case.rows * _IN_STEP)
    whole = {"max_length": _LONGEST + 1} if "max_length" in {item.name for item in trainer.techniques} else {}
    choices = {"per_device_train_batch_size": case.rows, **whole, **case.choices}
    candidate = trainer.normal(problem(here, trainer=case.trainer).baseline.but(**choices), here)
    return trainer.plan(candidate, here)


def _loaded(prepared: Prepared, plan: TrainingPlan, epochs: int, folder: Path) -> list[Typical]:
    """Return the sizes of all micro-batches that TRL's data loader yields, each once, with its share.

    Those of one size have the mean of their tokens without padding: what the loss computes goes with these.
    """
    trainer = prepared.trainer
    built, flat = prepared.built(plan, folder / "built"), trainer.layout(plan, _rows_of(plan)) is Layout.FLAT
    sequences = prepared.geometry(plan).sequences
    # Moving a row to the device looks at each token of its lists.
    built.accelerator.device_placement = False
    loader = built.get_train_dataloader()
    tokens: dict[Shape, list[int]] = defaultdict(list)
    for _ in range(epochs):
        for batch in loader:
            rows, padded = prepared.adapter.rows_and_tokens(built, batch)
            if not isinstance(batch, Mapping):
                # The rows of a generation batch, to which the completions come.
                shape = Shape(rows, padded // rows, round(plan.completions.widest) if plan.completions else 0)
                tokens[shape].append(padded)
                continue
            beside = batch["KL_input_ids"].shape[1] if "KL_input_ids" in batch else 0
            shape = Shape(rows if flat else rows // sequences, padded // rows, second_tokens=beside)
            tokens[shape].append(padded if flat else int(batch["attention_mask"].sum()))
    whole = {shape: held for shape, held in tokens.items() if flat or shape.rows == _rows_of(plan)}
    count = sum(map(len, whole.values()))
    return [
        Typical(
            replace(shape, filled=sum(held) / len(held) / (shape.rows * shape.tokens * sequences)), len(held) / count
        )
        for shape, held in whole.items()
    ]


def _rows_of(plan: TrainingPlan) -> int:
    return int(str(plan.args["per_device_train_batch_size"]))


def _of(geometry: BatchGeometry, sizes: Sequence[Typical]) -> BatchGeometry:
    """Return a geometry whose time is that of other sizes, each of which is traced.

    A plan times sizes that are hardly smaller than the worst by that one: here, the worst is larger than all.
    """
    larger = replace(geometry.worst, tokens=round(_LARGER * geometry.worst.tokens))
    # Trainers that generate load no padding that the loss leaves out.
    full = [replace(each, shape=replace(each.shape, filled=1.0)) if each.shape.generated else each for each in sizes]
    apart = tuple(
        replace(item, sizes=tuple(replace(each, shape=replace(each.shape, rows=item.worst.rows)) for each in full))
        for item in geometry.phases
    )
    return replace(geometry, worst=larger, sizes=tuple(full), phases=apart)


_LARGER = 1.1


def _at_mean(geometry: BatchGeometry) -> BatchGeometry:
    """Return a geometry whose time is that of one mean size without padding, in whole tokens."""

    def whole(mean: Shape) -> tuple[Typical, ...]:
        return (Typical(Shape(mean.rows, round(mean.tokens), round(mean.generated), round(mean.second_tokens))),)

    apart = tuple(replace(item, sizes=whole(mean_shape(item.sizes))) for item in geometry.phases)
    return replace(geometry, sizes=whole(geometry.typical), phases=apart)


def _seconds(found: object) -> float:
    if not isinstance(found, TracedPlan) or found.memory.step_seconds is None:
        raise RuntimeError(f"a step cannot be traced: {found}")
    return found.memory.step_seconds


def _rows(trainer: str, count: int) -> Iterator[dict[str, object]]:
    """Yield rows of log-normal lengths in random order, one of them the longest."""
    chance = random.Random(_SEED)
    step = (_LONGEST / _SHORTEST) ** (1 / (_KINDS - 1))
    kinds = [round(_SHORTEST * step**power) for power in range(_KINDS)]
    drawn = [_SHORTEST + chance.lognormvariate(6.0, 1.0) for _ in range(count - 1)]
    lengths = [min(kinds, key=lambda kind: abs(kind - tokens)) for tokens in drawn]
    lengths.insert(count // 2, _LONGEST)
    for number, tokens in enumerate(lengths):
        prompt, answer = tokens // 4, tokens - tokens // 4
        less = max(1, round(answer * chance.uniform(0.3, 1)))
        yield _row(trainer, prompt, answer, less, good=number % 2 == 0)


def _row(trainer: str, prompt: int, answer: int, less: int, *, good: bool) -> dict[str, object]:
    if trainer == "sft":
        return {"text": LETTER * (prompt + answer)}
    if trainer == "grpo":
        return {"prompt": LETTER * (prompt + answer)}
    if trainer == "kto":
        return {"prompt": LETTER * prompt, "completion": LETTER * answer, "label": good}
    return {"prompt": LETTER * prompt, "chosen": LETTER * answer, "rejected": LETTER * less}


def _line(found: Compared) -> str:
    sizes = ", ".join(f"{each.share:.1%} of {_said(each.shape)}" for each in found.sizes)
    return (
        f"| {found.case.name} | {found.case.epochs} | {len(found.every)} | {found.mean * 1e3:,.2f} ms | {sizes} "
        f"| {found.error:+.1%} | {found.error_at_mean:+.1%} |"
    )


def _said(shape: Shape) -> str:
    beside = f" and {shape.second_tokens:,}" if shape.second_tokens else ""
    return f"{shape.rows} x {shape.tokens:,}{beside}"


if __name__ == "__main__":
    main()
