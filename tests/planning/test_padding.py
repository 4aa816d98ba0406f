"""Plans with micro-batches whose padding, and so whose attention mask, differs from that of the widest one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from autotune.app.planned import planned_machine
from autotune.core.plan import TrainingPlan
from autotune.core.rows.documents import Documents
from autotune.core.rows.lengths import LengthDistribution
from autotune.core.workload import DatasetProfile, ModelSource
from autotune.planning.single import PlanTracer, SizedPlan
from autotune.planning.tracing.cache import Cache
from autotune.planning.tracing.store import Traces
from autotune.probing.tracing import ServerTracer
from autotune.trainers import find_trainer
from autotune.trainers.evaluation import whole_geometry
from tests.planning.test_own_sizes import plain_products
from tests.settings import setting, workload
from tests.small import write_small_model

pytestmark = pytest.mark.slow
SHAPE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8,
                         "num_key_value_heads": 1}  # fmt: skip


@dataclass(frozen=True)
class Mixed:
    """Rows, some of which need more memory in a micro-batch of their own than the longest.

    Attributes:
        rows: tokens of the parts of each row.
        part: those that need the most.
        evaluated: the same of the rows to evaluate on; empty without evaluation.
    """

    trainer: str
    dtype: str
    rows: Sequence[tuple[int, ...]]
    part: Sequence[tuple[int, ...]]
    evaluated: Sequence[tuple[int, ...]] = ()
    evaluated_part: Sequence[tuple[int, ...]] = ()
    args: dict[str, object] = field(default_factory=dict)


CASES = {
    "a row is rounded up, and a longer one is not": Mixed(
        "sft", "bfloat16", [(2048,), (1970,)], [(1970,)], args={"pad_to_multiple_of": 64}
    ),
    "some rows to evaluate on are of equal length": Mixed(
        "sft",
        "float32",
        [(300,)],
        [(300,)],
        [(2112,), (2048,), (2048,), (400,)],
        [(2048,), (2048,)],
        {"eval_strategy": "epoch", "per_device_eval_batch_size": 2},
    ),
}


@pytest.mark.parametrize(
    "mixed",
    [pytest.param(case, id=name, marks=plain_products if case.evaluated else ()) for name, case in CASES.items()],
)
def test_no_rows_need_more_memory_alone_than_among_longer_ones(
    mixed: Mixed, tracer: ServerTracer, tmp_path: Path
) -> None:
    known, gpu = find_trainer(mixed.trainer), planned_machine("H100-80GB", 1)
    model = ModelSource(str(write_small_model(tmp_path / "model", weights=False, **SHAPE)))
    sizes = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "max_length": None}
    args = {"gradient_checkpointing": False, "bf16": False, **sizes, **mixed.args}
    plan = TrainingPlan(mixed.trainer, args, {"attn_implementation": "sdpa", "dtype": mixed.dtype})

    def profile(like: DatasetProfile, rows: Sequence[tuple[int, ...]]) -> DatasetProfile:
        documents = Documents.of_rows([known.document(parts) for parts in rows], ordered=known.ordered)
        widths = LengthDistribution(documents.widths)
        return replace(like, lengths=widths, several=documents, trainable_tokens=documents.tokens)

    def needed(rows: Sequence[tuple[int, ...]], evaluated: Sequence[tuple[int, ...]]) -> int:
        of = workload()
        kinds = ("layer",) * SHAPE["num_hidden_layers"]
        of = replace(
            of,
            trainer=mixed.trainer,
            model_source=model,
            model=replace(of.model, layer_kinds=kinds, grouped_heads=True),
            dataset=profile(of.dataset, rows),
            evaluation=profile(of.dataset, evaluated) if evaluated else None,
        )
        steps = PlanTracer(Traces(tracer, Cache(tmp_path), "model", {}), setting(machine=gpu, of=of), gpu.gpu)
        return steps.memory(SizedPlan(plan, whole_geometry(known, plan, of))).device_bytes

    assert needed(mixed.rows, mixed.evaluated) >= needed(mixed.part, mixed.evaluated_part)
