"""The passes without gradients of trainers with a reference: their order, memory, and failures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from autotune.core.jobs.protocol import ProbeRequest
from autotune.core.measurement import Schedule
from autotune.core.plan import TrainingPlan
from autotune.core.program import PRECOMPUTE
from autotune.core.status import ProbeStatus
from autotune.step.run.batches import plan_batches
from autotune.step.run.meters import CpuMeter
from autotune.step.run.progress import Progress
from autotune.step.run.timing import WholeStep
from autotune.step.run.training import build_trainer, step_size, train
from autotune.trainers import find_trainer
from autotune.trainers.dpo import REFERENCE_PASS
from autotune.trainers.kto import POLICY_KL, REFERENCE_KL
from tests.step.requests import probed_here
from tests.trainers.prepared import Prepare, Prepared, richest

SCHEDULE = Schedule(warmup_micro_batches=1, min_micro_batches=2, max_micro_batches=2)
SIZES = {"per_device_train_batch_size": 5, "gradient_accumulation_steps": 2, "max_length": 64}
PRECOMPUTED: Mapping[str, object] = {"precompute_ref_log_probs": True}
WITHOUT_KL: Mapping[str, object] = {"loss_type": "apo_zero_unpaired"}
ADAPTERS: Mapping[str, object] = {"use_peft": True, "lora_target_modules": "all-linear"}


@dataclass(frozen=True)
class Case:
    """A plan of a trainer, and its passes.

    Attributes:
        passes: of each micro-batch, in order.
        args: of the trainer, without sizes.
        model: words of adapters, which are switched off for the reference; without them, a copy of the model is it.
    """

    trainer: str
    passes: tuple[str, ...]
    args: Mapping[str, object] = field(default_factory=dict)
    model: Mapping[str, object] = field(default_factory=dict)

    def request(self, found: Prepared) -> ProbeRequest:
        """Return the request for a probe of the plan on prepared rows."""
        plan = TrainingPlan(self.trainer, {"use_cpu": True, "bf16": False, **SIZES, **self.args}, self.model)
        return found.request(plan, SCHEDULE)


OF_KTO = (POLICY_KL, REFERENCE_KL, REFERENCE_PASS)
CASES = {
    "dpo, a copy": Case("dpo", (REFERENCE_PASS,)),
    "dpo, adapters off": Case("dpo", (REFERENCE_PASS,), model=ADAPTERS),
    "dpo, precomputed": Case("dpo", (), PRECOMPUTED),
    "kto, a copy": Case("kto", OF_KTO),
    "kto, adapters off": Case("kto", OF_KTO, model=ADAPTERS),
    "kto, precomputed": Case("kto", (POLICY_KL,), PRECOMPUTED),
    "kto, without KL": Case("kto", (REFERENCE_PASS,), WITHOUT_KL),
    "kto, precomputed without KL": Case("kto", (), {**WITHOUT_KL, **PRECOMPUTED}),
}


def found_for(case: Case, prepared: Prepare) -> Prepared:
    trainer = find_trainer(case.trainer)
    # With prompts of their own, some of which leave no room for answers.
    return prepared(trainer, richest(trainer))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_passes_without_gradients_are_the_phases_of_the_program(case: Case, prepared: Prepare, tmp_path: Path) -> None:
    request = case.request(found_for(case, prepared))
    seen: list[str] = []

    class Heard(Progress):
        @contextmanager
        def in_phase(self, phase: str) -> Iterator[None]:
            seen.append(phase)
            with super().in_phase(phase):
                yield

    progress = Heard(SCHEDULE, CpuMeter())
    train(request, tmp_path, progress)
    before = (PRECOMPUTE,) if PRECOMPUTED.items() <= case.args.items() else ()
    assert seen == [*before, *case.passes * (progress.steps_done * progress.batches.step_micro_batches)]
    names = find_trainer(case.trainer).program(request.plan).names
    assert tuple(name for name in names if name in seen) == before + case.passes


@pytest.mark.parametrize(
    ("case", "phase"),
    [
        pytest.param(case, phase, id=f"{name}, {phase}")
        for name, case in CASES.items() for phase in case.passes if not case.args
    ],
)  # fmt: skip
def test_what_fails_in_a_pass_is_told_as_that(case: Case, phase: str, prepared: Prepare, tmp_path: Path) -> None:
    found = found_for(case, prepared)
    request, known, progress = case.request(found), found.adapter, Progress(SCHEDULE, CpuMeter())
    trainer = build_trainer(request, found.rows, tmp_path, progress)

    def fail(*_: object) -> None:
        # Of several passes, only the phase shows which of them runs.
        if not torch.is_grad_enabled() and (len(case.passes) == 1 or progress.phase == phase):
            raise MemoryError("nothing is left")

    for model in {trainer.ref_model or trainer.model, trainer.model}:
        layer = next(module for name, module in model.named_modules() if name.endswith("layers.0"))
        layer.register_forward_pre_hook(fail)
    progress.batches = plan_batches(
        known.sizes(trainer), step_size(request.plan), known.collation(trainer), SCHEDULE, 0, None
    )
    progress.whole_step = WholeStep(2, 1.0)
    with pytest.raises(MemoryError):
        trainer.train()
    assert progress.phase == phase


@pytest.mark.parametrize(
    ("name", "given", "epochs"),
    [("dpo, precomputed", {}, 3), ("kto, precomputed", {"num_train_epochs": 2, "max_steps": -1}, 2)],
)
def test_asking_the_reference_beforehand_is_timed_and_spread_over_all_epochs(
    name: str, given: Mapping[str, object], epochs: int, prepared: Prepare, tmp_path: Path
) -> None:
    found = found_for(CASES[name], prepared)
    # Some rows are dropped.
    request = replace(CASES[name], args={**PRECOMPUTED, "max_length": 30, **given}).request(found)
    shown = probed_here(request, tmp_path)
    assert shown.status is ProbeStatus.OK, shown
    assert shown.pass_seconds > 0
    documents = found.reply.dataset.documents
    assert shown.rows == documents.rows_kept(30) < documents.rows
    assert shown.step_seconds is not None
    assert shown.tokens_per_step is not None
    spread = shown.pass_seconds * 10 / shown.rows / epochs
    assert shown.tokens_per_second == pytest.approx(shown.tokens_per_step / (shown.step_seconds + spread))
