"""The same honest check for KTO: its passes on mismatched pairs, its reference, and the pass beforehand."""

from __future__ import annotations

import pytest

from autotune.core.batch_geometry import Layout, Shape
from autotune.core.plan import TrainingPlan
from autotune.step.run.traced_training import TracedRows, traced_training
from autotune.trainers import find_trainer
from autotune.trainers.kto import POLICY_KL, PRECOMPUTE, REFERENCE_KL, REFERENCE_PASS
from autotune.virtual import trace
from autotune.virtual.phases import inside, step_name
from autotune.virtual.reference import run_on_cpu
from tests.small import small_tokenizer
from tests.virtual.models import ARCHITECTURES, config_of
from tests.virtual.test_against_cpu import ATTENTION_LORA, LORA, small_vocabulary_tiles

__all__ = ["small_vocabulary_tiles"]

ROWS = 3
# Mismatched pairs that are narrower than rows, and some that are wider.
SHAPES = {"narrower": Shape(ROWS, 48, beside=36), "wider": Shape(ROWS, 36, beside=60)}
PASSES = {
    "copy": (POLICY_KL, REFERENCE_KL, REFERENCE_PASS),
    "adapters off": (POLICY_KL, REFERENCE_KL, REFERENCE_PASS),
    "precomputed": (PRECOMPUTE, POLICY_KL),
    "without KL": (REFERENCE_PASS,),
}


def peaks(architecture: str, reference: str, shape: Shape, *, checkpointing: bool) -> None:
    words = (ATTENTION_LORA if "moe" in architecture else LORA) if reference == "adapters off" else {}
    args = {
        "per_device_train_batch_size": ROWS,
        "max_length": 64,
        "bf16": False,
        "gradient_checkpointing": checkpointing,
        "precompute_ref_log_probs": reference == "precomputed",
        "loss_type": "apo_zero_unpaired" if reference == "without KL" else "kto",
    }
    plan = TrainingPlan("kto", args=args, model=words)
    rows = TracedRows(find_trainer("kto").traced_rows(Layout.PADDED, shape, 0.5))
    steps = traced_training(plan, config_of(architecture, num_hidden_layers=2), small_tokenizer(), rows)

    names = ("optimizer step", PRECOMPUTE)
    traced, real = trace(steps, target="cpu"), run_on_cpu(steps, phases=names)

    for name in (step_name(0), step_name(1), *((PRECOMPUTE,) if reference == "precomputed" else ())):
        found, expected = traced.phase(name).device_peak.bytes, real[name].peak_bytes
        assert abs(found / expected - 1) <= 0.01, f"{name}: peak {found} for {expected}"
    for name in PASSES[reference]:
        if name != PRECOMPUTE:
            (once,) = inside(traced, traced.phase(step_name(1)), name)
            assert 0 < once.device_peak.bytes <= traced.phase(step_name(1)).device_peak.bytes


@pytest.mark.parametrize("checkpointing", [False, True], ids=["stored", "checkpointed"])
@pytest.mark.parametrize(
    ("reference", "shape"), [*((reference, "wider") for reference in PASSES), ("copy", "narrower")]
)
def test_traced_peaks_are_those_of_the_cpu(reference: str, shape: str, checkpointing: bool) -> None:
    peaks("llama", reference, SHAPES[shape], checkpointing=checkpointing)


@pytest.mark.nightly
@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name != "llama"])
def test_traced_peaks_of_other_architectures_are_those_of_the_cpu(architecture: str) -> None:
    peaks(architecture, "adapters off", SHAPES["wider"], checkpointing=True)
