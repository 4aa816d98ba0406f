"""Traced against real peaks on the CPU, in every phase: seven families of models, seven trainers, full and LoRA.

Run ``python -m benchmarks.plan.families``; it prints a Markdown table, one row per case, and the errors of each trainer
and of each phase.
"""

from __future__ import annotations

import argparse
import io
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, replace
from statistics import median
from tempfile import TemporaryDirectory
from unittest import mock

from autotune.core.plan import TrainingPlan
from autotune.core.program import BACKWARD, FORWARD, OPTIMIZER_STEP
from autotune.core.rows.batch_geometry import Shape
from autotune.step.run.traced_training import traced_training
from autotune.step.run.virtual_trainer import STEPS, TracedRows
from autotune.trainers import find_trainer
from autotune.trainers.base import EVAL_STRATEGY
from autotune.trainers.distillation import TEACHER
from autotune.trainers.prompts import NO_REWARD
from autotune.virtual import trace
from autotune.virtual.steps.phases import step_name
from tests.small import small_tokenizer
from tests.virtual.models import FAMILIES, config_of
from tests.virtual.reference import phases_on_cpu

LAYERS = 2
_TRAINABLE = 0.5
# TRL's tile of 32768 words would be most of a small model's peak and hide every error in the rest.
_TILE = 128
_TILES = ("trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE", "trl.kernels.chunked_divergence.VOCAB_CHUNK_SIZE")
# A trace numbers optimizer steps, and does not divide a micro-batch into its forward and backward passes.
_UNNAMED = frozenset({OPTIMIZER_STEP, FORWARD, BACKWARD})
STEADY = step_name(STEPS - 1)


@dataclass(frozen=True)
class Setup:
    """What is compared of a trainer.

    Attributes:
        shape: the micro-batch.
        variants: arguments that turn phases on and off; families take them in turn.
        rewards: reward functions.
    """

    shape: Shape
    variants: tuple[Mapping[str, object], ...] = ({},)
    rewards: tuple[str, ...] = ()


_BESIDE_AND_BEFORE: tuple[Mapping[str, object], ...] = ({}, {"precompute_ref_log_probs": True})
_PAIR, _COMPLETED = Shape(2, 48), Shape(2, 48, generated=16)
_GROUP: Mapping[str, object] = {"num_generations": 2}
SETUPS: Mapping[str, Setup] = {
    "sft": Setup(_PAIR, ({}, {"packing": True})),
    "dpo": Setup(_PAIR, _BESIDE_AND_BEFORE),
    "kto": Setup(Shape(3, 36, second_tokens=60), _BESIDE_AND_BEFORE),
    "reward": Setup(_PAIR),
    # Two iterations over the same completions need their old log-probabilities.
    "grpo": Setup(_COMPLETED, ({"beta": 0.0, **_GROUP}, {"beta": 0.04, "num_iterations": 2, **_GROUP}), (NO_REWARD,)),
    "rloo": Setup(_COMPLETED, ({"beta": 0.05, **_GROUP}, {"beta": 0.0, **_GROUP}), (NO_REWARD,)),
    "online_dpo": Setup(_COMPLETED, rewards=(NO_REWARD,)),
    # The reverse divergence, and one whose tiles are projected twice.
    "distillation": Setup(_COMPLETED, ({"beta": 1.0}, {"beta": 0.5})),
}


_LORA: Mapping[str, object] = {"use_peft": True, "lora_r": 8, "lora_target_modules": "all-linear"}
# PEFT takes the fused weights of Mixtral's experts for linear layers, and adapts these without dropout only.
_LORA_OF: Mapping[str, Mapping[str, object]] = {"mixtral": {"lora_dropout": 0.0}}


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    family: str
    trainer: str
    lora: bool

    @property
    def weights(self) -> str:
        """Which weights are trained."""
        return "LoRA" if self.lora else "full"

    @property
    def checkpointing(self) -> bool:
        """Whether activations are recomputed: for every second family, and for the others with adapters."""
        return (FAMILIES.index(self.family) % 2 == 1) != self.lora

    @property
    def variant(self) -> Mapping[str, object]:
        """The trainer's arguments that differ between families: in pairs, so that checkpointing differs in each."""
        variants = SETUPS[self.trainer].variants
        return variants[(FAMILIES.index(self.family) // 2 + self.lora) % len(variants)]

    @property
    def plan(self) -> TrainingPlan:
        """The training plan, before a trace sets its sizes."""
        trainer = find_trainer(self.trainer)
        args = {"bf16": False, "gradient_checkpointing": self.checkpointing, **self.variant}
        # Two micro-batches, so that gradients are held while the second one is trained on.
        args |= {"gradient_accumulation_steps": 2}
        if trainer.evaluates:
            args |= {"eval_strategy": EVAL_STRATEGY}
        needed = trainer.also_set.get("model.use_peft", {})
        words = {
            **_LORA,
            **_LORA_OF.get(self.family, {}),
            **{path.removeprefix("model."): value for path, value in needed.items()},
        }
        return TrainingPlan(self.trainer, args, words if self.lora else {}, rewards=SETUPS[self.trainer].rewards)


@dataclass(frozen=True)
class Compared:
    """One phase: the highest level of bytes in it, all that was live included.

    Attributes:
        before_bytes: level on the real CPU as it began.
    """

    name: str
    real_bytes: int
    traced_bytes: int
    before_bytes: int

    @property
    def error(self) -> float:
        """Relative to the real peak; negative for an underestimate."""
        return self.traced_bytes / self.real_bytes - 1


CASES = tuple(itertools.starmap(Case, itertools.product(FAMILIES, SETUPS, (False, True))))


def compared(case: Case) -> tuple[Compared, ...]:
    """Trace and run the same two optimizer steps, and return every phase that the trace names, however short.

    A teacher is of the same family, with a layer more.

    Raises:
        RuntimeError: a phase comes more or less often than on the real CPU, or one of the program does not come.
    """
    with TemporaryDirectory() as folder:
        plan = case.plan
        if find_trainer(case.trainer).has_teacher:
            config_of(case.family, num_hidden_layers=LAYERS + 1).save_pretrained(folder)
            plan = replace(plan, args={**plan.args, TEACHER: folder})
        return _compared(case, plan)


def at_its_shape(own: TrainingPlan) -> tuple[TrainingPlan, TracedRows]:
    """Return a plan at the micro-batch of its trainer, and the rows of that."""
    trainer, shape = find_trainer(own.trainer), SETUPS[own.trainer].shape
    own = replace(own, args={"per_device_train_batch_size": shape.rows, **own.args})
    layout = trainer.layout(own, shape.rows)
    rows = TracedRows(trainer.traced_rows(layout, shape, _TRAINABLE), trainable=_TRAINABLE)
    return trainer.traced_plan(own, layout, shape), rows


def _compared(case: Case, own: TrainingPlan) -> tuple[Compared, ...]:
    plan, rows = at_its_shape(own)
    steps = traced_training(plan, config_of(case.family, num_hidden_layers=LAYERS), small_tokenizer(), rows)
    # TRL prints its metrics.
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(io.StringIO()))
        for tile in _TILES:
            stack.enter_context(mock.patch(tile, _TILE))
        traced = trace(steps, target="cpu")
        names = Counter(phase.name for phase in traced.phases)
        real = phases_on_cpu(steps, names.__contains__)
    if names != Counter(phase.name for phase in real):
        raise RuntimeError(f"{case}: {names} were traced, and {Counter(phase.name for phase in real)} were run")
    missing = [name for name in find_trainer(case.trainer).program(plan).names if name not in {*names, *_UNNAMED}]
    if missing:
        raise RuntimeError(f"{case}: the phases {missing} were not run")
    return tuple(
        Compared(name, found.peak_bytes, phase.device_peak.bytes, found.start_bytes)
        for name in names
        for phase, found in zip(
            (phase for phase in traced.phases if phase.name == name),
            (phase for phase in real if phase.name == name),
            strict=True,
        )
    )


def main() -> None:
    """Run every case and print the tables."""
    parser = argparse.ArgumentParser(description="Traced against real peaks of every phase on the CPU.")
    parser.add_argument("--family", choices=FAMILIES, action="append")
    parser.add_argument("--trainer", choices=SETUPS, action="append")
    arguments = parser.parse_args()
    families, names = arguments.family or FAMILIES, arguments.trainer or SETUPS
    print(
        "| family | trainer | weights | checkpointing | arguments | real bytes | traced bytes | error | phases "
        "| worst phase | its error |"
    )
    print("|---|---|---|---|---|--:|--:|--:|--:|---|--:|", flush=True)
    found: dict[Case, tuple[Compared, ...]] = {}
    for case in CASES:
        if case.family in families and case.trainer in names:
            found[case] = compared(case)
            print(row(case, found[case]), flush=True)
    every = [(case, phase) for case, phases in found.items() for phase in phases]
    print("\n| trainer | cases | phases | median error | worst error | in |")
    print("|---|--:|--:|--:|--:|---|")
    for name in names:
        chosen = [(case, phase) for case, phase in every if case.trainer == name]
        print(f"| {name} | {len({case for case, _ in chosen})} | {_errors(chosen)} |")
    print(f"| all | {len(found)} | {_errors(every)} |")
    print("\n| phase | phases | median error | worst error | in | of its peak, allocated in it |")
    print("|---|--:|--:|--:|---|--:|")
    for name in dict.fromkeys(phase.name for _, phase in every):
        chosen = [(case, phase) for case, phase in every if phase.name == name]
        added = median(1 - phase.before_bytes / phase.real_bytes for _, phase in chosen)
        print(f"| {name} | {_errors(chosen)} | {added:.0%} |")


def row(case: Case, phases: Sequence[Compared]) -> str:
    """Return a row of the table: the steady optimizer step, and the phase with the largest error."""
    steady, worst = next(phase for phase in phases if phase.name == STEADY), worst_of(phases)
    words = ", ".join(f"{name}={value}" for name, value in case.variant.items())
    checkpointing = "on" if case.checkpointing else "off"
    return (
        f"| {case.family} | {case.trainer} | {case.weights} | {checkpointing} | {words} "
        f"| {steady.real_bytes:,} | {steady.traced_bytes:,} | {steady.error:+.4%} | {len(phases)} "
        f"| {worst.name} | {worst.error:+.4%} |"
    )


def worst_of(phases: Iterable[Compared]) -> Compared:
    """Return the phase with the largest error."""
    return max(phases, key=lambda phase: abs(phase.error))


def _errors(found: Sequence[tuple[Case, Compared]]) -> str:
    phases = [phase for _, phase in found]
    worst = worst_of(phases)
    case = found[phases.index(worst)][0]
    return (
        f"{len(phases)} | {median(abs(phase.error) for phase in phases):.4%} | {worst.error:+.4%} "
        f"| {worst.name}, {case.family} {case.trainer} {case.weights}"
    )


if __name__ == "__main__":
    main()
