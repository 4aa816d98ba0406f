"""Estimates at a candidate's own sizes, compared with PyTorch's CPU allocator."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.app.planned import planned_machine
from autotune.core.documents.estimate import MemoryEstimate
from autotune.core.plan import Completions, TrainingPlan
from autotune.core.rows.batch_geometry import BatchGeometry, Layout
from autotune.core.rows.documents import Documents
from autotune.core.rows.lengths import LengthDistribution
from autotune.core.setting import Setting
from autotune.core.workload import ModelSource
from autotune.planning.single import PlanTracer, SizedPlan
from autotune.planning.tracing.cache import Cache
from autotune.planning.tracing.store import Traces
from autotune.probing.tracing import ServerTracer
from autotune.step.run.traced_training import traced_training
from autotune.step.run.virtual_trainer import TracedRows
from autotune.trainers import find_trainer
from autotune.trainers.prompts import GENERATION, NO_REWARD
from autotune.virtual.steps.phases import step_name
from tests.settings import setting, workload
from tests.small import small_config, small_tokenizer, write_small_model
from tests.virtual.reference import run_on_cpu

plain_products = pytest.mark.skipif(
    torch.__version__ >= (2, 14), reason="mem-efficient attention takes grouped heads since PyTorch 2.14"
)
"""Tests of attention in float32 without a mask, which stores all scores if heads are grouped."""

pytestmark = pytest.mark.slow

LONGEST = 2250
SHAPE: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
                         "num_key_value_heads": 1}  # fmt: skip
KINDS = ["layer"] * SHAPE["num_hidden_layers"]
# Prompts with their answers: in each batch, the longest row and shorter ones.
ROWS: dict[str, list[tuple[int, ...]]] = {
    "dpo": [(500, LONGEST - 500, 600), (300, 200, 900)],
    "kto": [(500, LONGEST - 500), (900, 300)],
}


@pytest.fixture
def model(tmp_path: Path) -> ModelSource:
    return ModelSource(str(write_small_model(tmp_path / "model", weights=False, **SHAPE)))


def here(trainer: str, model: ModelSource) -> Setting:
    """Return the long rows of a trainer on a CPU."""
    known, of = find_trainer(trainer), workload()
    documents = Documents.of_rows([known.document(parts) for parts in ROWS[trainer]], ordered=known.ordered)
    widths = LengthDistribution(documents.widths)
    rows = replace(of.dataset, lengths=widths, several=documents, trainable_tokens=documents.tokens)
    layers = replace(of.model, layer_kinds=tuple(KINDS))
    of = replace(of, trainer=trainer, model_source=model, model=layers, dataset=rows)
    return setting(of=of, global_batch_size=2)


@pytest.mark.parametrize("trainer", ["dpo", pytest.param("kto", marks=pytest.mark.nightly)])
def test_the_need_at_a_candidates_own_sizes_is_that_of_the_cpu(
    trainer: str, model: ModelSource, tracer: ServerTracer, tmp_path: Path
) -> None:
    known, rows, where = find_trainer(trainer), ROWS[trainer], here(trainer, model)
    sizes = {"per_device_train_batch_size": len(rows), "gradient_accumulation_steps": 1, "max_length": LONGEST}
    plan = TrainingPlan(trainer, {"gradient_checkpointing": True, "bf16": False, **sizes})
    alone = PlanTracer(Traces(tracer, Cache(tmp_path), "model", {}), where, device=None)
    estimated = alone.memory(SizedPlan(plan, known.geometry(plan, where.workload.dataset.documents)))

    # The trainer itself reads the rows and puts them together.
    real = run_on_cpu(traced_training(plan, small_config(**SHAPE), small_tokenizer(), TracedRows(rows)))

    peak_bytes = max(real[step_name(number)].peak_bytes for number in (0, 1))
    assert estimated.peak_bytes == pytest.approx(peak_bytes, rel=0.01)


@pytest.mark.parametrize("precision", [pytest.param("float32", marks=plain_products), "bfloat16"])
def test_rows_without_padding_are_traced_too_where_attention_without_a_mask_may_need_more(
    precision: str, model: ModelSource, tracer: ServerTracer, tmp_path: Path
) -> None:
    gpu, of = planned_machine("H100-80GB", 1), here("kto", model).workload
    documents = Documents.of_lengths(LengthDistribution({2048: 2, 1900: 1, 300: 1}))
    rows = replace(of.dataset, lengths=LengthDistribution({2048: 2, 1900: 1, 300: 1}), several=documents)
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "max_length": 2048}
    model_args = {"attn_implementation": "sdpa", "dtype": precision}
    plan = TrainingPlan("sft", {"gradient_checkpointing": False, "bf16": False, **sizes}, model_args)
    padded = find_trainer("sft").geometry(plan, documents)
    assert padded.layout is Layout.PADDED
    unpadded = replace(padded, layout=Layout.EQUAL, worst=replace(padded.worst, filled=1.0))

    def needed(geometry: BatchGeometry, *, grouped: bool) -> int:
        changed = replace(of, trainer="sft", model=replace(of.model, grouped_heads=grouped), dataset=rows)
        where = setting(machine=gpu, of=changed)
        found = PlanTracer(Traces(tracer, Cache(tmp_path), "model", {}), where, gpu.gpu)
        return found.memory(SizedPlan(plan, geometry)).peak_bytes

    alone = [needed(geometry, grouped=False) for geometry in (padded, unpadded)]
    assert needed(padded, grouped=True) == max(alone)
    # FlashAttention shares heads, and needs no mask.
    assert (alone[0] > alone[1]) is (precision == "bfloat16")


@pytest.mark.nightly
@plain_products
def test_prompts_of_one_length_are_traced_too_where_attention_without_a_mask_may_need_more(
    model: ModelSource, tracer: ServerTracer, tmp_path: Path
) -> None:
    gpu, of = planned_machine("H100-80GB", 1), here("kto", model).workload
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "num_generations": 2}
    args = {"gradient_checkpointing": False, "bf16": False, "max_completion_length": 4, "beta": 0.0, **sizes}
    model_args = {"attn_implementation": "sdpa", "dtype": "float32"}
    plan = TrainingPlan("grpo", args, model_args, rewards=(NO_REWARD,), completions=Completions(4, 4))

    def needed(lengths: dict[int, int], *, grouped: bool) -> MemoryEstimate:
        widths = LengthDistribution(lengths)
        rows = replace(of.dataset, lengths=widths, several=Documents.of_lengths(widths))
        changed = replace(of, trainer="grpo", model=replace(of.model, grouped_heads=grouped), dataset=rows)
        found = PlanTracer(Traces(tracer, Cache(tmp_path), "model", {}), setting(machine=gpu, of=changed), gpu.gpu)
        geometry = find_trainer("grpo").geometry(plan, rows.documents)
        return found.memory(SizedPlan(plan, geometry), whole=True)

    # Eight prompts are completed together: all prompts have 1,024 tokens, or just as many.
    expected = needed({1024: 9}, grouped=True)
    mixed = {1024: 8, 1040: 1, 300: 9}
    assert needed(mixed, grouped=False).peak_bytes < expected.peak_bytes
    found = needed(mixed, grouped=True)
    assert (found.phase, found.peak_bytes) == (GENERATION, expected.peak_bytes)
