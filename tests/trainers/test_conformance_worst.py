"""Conformance of every trainer: no micro-batch of TRL's data loader needs more memory than a probe's worst one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotune.core.candidate import Choice
from autotune.step.run.batches import plan_batches
from autotune.step.run.training import step_size
from autotune.trainers import trainers
from autotune.trainers.base import Trainer
from autotune.virtual import phase
from tests.trainers.prepared import WHOLE_STEPS, Prepare, Prepared, richest
from tests.virtual.reference import run_on_cpu

Choices = Mapping[str, Choice]

pytestmark = [pytest.mark.usefixtures("small_vocabulary_tiles"), pytest.mark.nightly]
EPOCHS = 3
"""Each of them in another order."""
WORST, DRAWN = "worst", "drawn"
_SIZES: tuple[Choices, ...] = ({"per_device_train_batch_size": 4}, {"per_device_train_batch_size": 3, "max_length": 41})
_FLAT: tuple[Choices, ...] = (
    {"packing": "bfd", "max_length": 96, "per_device_train_batch_size": 2},
    {"padding_free": "on", "per_device_train_batch_size": 4},
)
# Few short completions, since all of them are generated. A trainer has the first of these whose techniques it has.
_GENERATED: tuple[Choices, ...] = (
    {"max_completion_length": 8, "num_generations": 2, "per_device_train_batch_size": 4},
    {"max_new_tokens": 8, "per_device_train_batch_size": 4},
    {"max_completion_length": 8, "per_device_train_batch_size": 4},
)


def cases(trainer: Trainer) -> Iterator[Any]:
    """Yield the sizes that a trainer has the techniques of.

    Of trainers that do not generate, ``test_adversarial.py`` measures all micro-batches that there can be, by day, too.
    """
    known = {item.name for item in trainer.techniques}
    had = [item for item in (_GENERATED if trainer.generates else (*_SIZES, *_FLAT)) if item.keys() <= known]
    had = had[:1] if trainer.generates else had
    for choices in had:
        name = "-".join([trainer.name, *(f"{knob}={value}" for knob, value in choices.items())])
        yield pytest.param(trainer, choices, id=name)


CASES = [case for trainer in trainers().values() for case in cases(trainer)]


def run_each(trainer: Any, batches: Iterable[Any], name: str) -> None:
    """Run forward and backward of micro-batches, each from the same state, as a phase of its own."""
    trainer.current_gradient_accumulation_steps = 1
    for number, batch in enumerate(batches):
        with phase(f"{name} {number}"):
            trainer.training_step(trainer.model, batch, None)
        trainer.model.zero_grad(set_to_none=True)


def worst_batches(found: Prepared, trainer: Any, packed_from: int | None, plan: Any) -> Iterator[Any]:
    """Yield the micro-batches that a probe runs as the worst ones, twice: first calls fill caches."""
    known = found.adapter
    chosen = plan_batches(
        known.sizes(trainer), step_size(plan, known.drawing(trainer)), known.collation(trainer), WHOLE_STEPS, 0,
        packed_from,
    )  # fmt: skip
    given, shuffled = trainer.train_dataset, trainer.args.train_sampling_strategy
    trainer.train_dataset = known.select_batches(trainer, chosen.order, chosen.is_worst)
    trainer.args.train_sampling_strategy = "sequential"
    for _ in range(2):
        loader = trainer.get_train_dataloader()
        # What is drawn at once may be divided into several micro-batches.
        divided = len(loader) / len(chosen.is_worst)
        yield from (batch for place, batch in enumerate(loader) if chosen.is_worst[int(place / divided)])
    trainer.train_dataset, trainer.args.train_sampling_strategy = given, shuffled


def peaks(found: Prepared, choices: Choices, folder: Path) -> tuple[int, int]:
    """Return the real bytes that a probe's worst micro-batches need, and those of some epochs, each at the most."""
    plan = found.plan(choices)
    built = found.built(plan, folder)
    packed_from = len(found.adapter.cut(found.rows, plan)) if found.adapter.packs(built.args) else None
    # Whatever is generated is as long as it may be.
    each = np.arange(len(built.train_dataset))

    def run(_device: Any) -> None:
        run_each(built, worst_batches(found, built, packed_from, plan), WORST)
        built.train_dataset = found.adapter.select_batches(built, each[:, None], each >= 0)
        run_each(built, (batch for _ in range(EPOCHS) for batch in built.get_train_dataloader()), DRAWN)

    taken = {name: seen.peak_bytes - seen.start_bytes for name, seen in run_on_cpu(run, phases=(WORST, DRAWN)).items()}
    worst = [size for name, size in taken.items() if name.startswith(WORST)]
    drawn = [size for name, size in taken.items() if name.startswith(DRAWN)]
    assert len(drawn) >= EPOCHS
    return max(worst[len(worst) // 2 :]), max(drawn)


@pytest.mark.parametrize(("trainer", "choices"), CASES)
def test_no_micro_batch_needs_more_than_the_worst_of_a_probe(
    trainer: Trainer, choices: Choices, prepared: Prepare, tmp_path: Path
) -> None:
    found = prepared(trainer, richest(trainer))
    worst, drawn = peaks(found, choices, tmp_path)
    assert drawn <= worst
    # The longest rows come together only where the order is the dataset's own.
    assert drawn > worst / 2
