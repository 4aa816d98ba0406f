"""Precomputed log-probabilities come from the same reference model as TRL's, and have the same values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM

from autotune.core.plan import TrainingPlan
from autotune.core.program import PRECOMPUTE
from autotune.core.rows.blocks import block_rows
from autotune.step.rows import quantile_indices
from autotune.step.run.traced_training import traced_training
from autotune.step.run.virtual_trainer import TracedRows
from autotune.step.trainers import find_adapter
from autotune.step.trainers.reference import OnTokenizedRows
from autotune.trainers import find_trainer
from autotune.trainers.dpo import REFERENCE_PASS
from autotune.trainers.kto import REFERENCE_KL
from autotune.virtual import trace
from autotune.virtual.cost.roofline import Kind
from tests.small import small_config, small_tokenizer

TRAINERS = pytest.mark.parametrize("name", ["dpo", "kto"])
ROWS_AT_ONCE = 2
PRECOMPUTED: Mapping[str, object] = {"precompute_ref_log_probs": True}


class Engine(torch.nn.Module):
    """A stand-in for a model wrapped by DeepSpeed."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.module = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def built(name: str, folder: Path) -> Any:
    """Return an adapter's trainer, with a reference, on rows of several lengths."""
    known = find_adapter(name)
    args = {
        "output_dir": str(folder), "use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True,
        "per_device_train_batch_size": ROWS_AT_ONCE, "max_length": 64,
    }  # fmt: skip
    plan = TrainingPlan(name, args)
    torch.manual_seed(0)
    parts = len(find_trainer(name).row_of(64)[0])
    sizes = [(8, *(4 + 3 * row + part for part in range(1, parts))) for row in range(2 * ROWS_AT_ONCE)]
    arguments = known.config(**args)
    rows = known.synthetic(sizes, plan, 1.0)
    model, reference = (AutoModelForCausalLM.from_config(small_config()) for _ in range(2))
    return known.trainer_class(plan)(
        model=model, ref_model=reference, args=arguments, train_dataset=rows, processing_class=small_tokenizer()
    )


@TRAINERS
@pytest.mark.parametrize("case", ["the model itself", "a reference", "DeepSpeed's engine", "a reference and DeepSpeed"])
def test_log_probabilities_of_the_reference_are_those_of_trl(
    name: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, engines = built(name, tmp_path), []
    if "a reference" not in case:
        trainer.ref_model = None
    trainer.is_deepspeed_enabled = "DeepSpeed" in case

    def prepared(model: torch.nn.Module, *_: object) -> Engine:
        engines.append(Engine(model))
        return engines[-1]

    for module in (f"trl.trainer.{name}_trainer", "autotune.step.trainers.reference"):
        monkeypatch.setattr(f"{module}.prepare_deepspeed", prepared)
    compute = trainer.compute_ref_log_probs

    def asked_by(kind: type[Any]) -> tuple[set[Any], list[float]]:
        """Return the models that ran, and the log-probabilities of each row."""
        asked: set[Any] = set()
        found: list[float] = []
        trainer._precompute_engine, trainer._precompute_model_hash = None, None

        def told(model: Any, inputs: Any) -> Any:
            asked.add(getattr(model, "module", model))
            answers = compute(model, inputs)
            found.extend(value for answer in answers if answer is not None for value in answer.tolist())
            return answers

        monkeypatch.setattr(trainer, "compute_ref_log_probs", told)
        kind._precompute_ref_logps(trainer, trainer.train_dataset, "train", ROWS_AT_ONCE)
        return asked, found

    real, every = asked_by(getattr(trl, find_trainer(name).trainer_class))
    made_by_trl = len(engines)
    ours, some = asked_by(type(trainer))
    assert ours == real == {trainer.ref_model or trainer.model}
    # An engine is made once, and for the model alone: a reference has its own already.
    assert made_by_trl == len(engines) - made_by_trl == (case == "DeepSpeed's engine")
    assert some
    for value in some:
        assert min(abs(value - other) for other in every) < 1e-4


@TRAINERS
def test_rows_that_a_probe_does_not_pass_get_log_probabilities_near_those_of_trl(name: str, tmp_path: Path) -> None:
    trainer = built(name, tmp_path)
    trainer._precompute_engine, trainer._precompute_model_hash = None, None
    real, probed = (
        kind._precompute_ref_logps(trainer, trainer.train_dataset, "train", ROWS_AT_ONCE)
        for kind in (getattr(trl, find_trainer(name).trainer_class), type(trainer))
    )
    columns = [column for column in real.column_names if column.startswith("ref_")]
    assert columns
    for column in columns:
        assert probed[column] == pytest.approx(list(real[column]), rel=0.2)


@pytest.mark.parametrize(
    ("name", "asking"),
    [pytest.param("dpo", (REFERENCE_PASS,), marks=pytest.mark.nightly), ("kto", (REFERENCE_KL, REFERENCE_PASS))],
    ids=["dpo", "kto"],
)
def test_a_trace_asks_beforehand_about_one_micro_batch_as_it_does_beside_the_training(
    name: str, asking: tuple[str, ...]
) -> None:
    parts = len(find_trainer(name).row_of(64)[0])
    rows = TracedRows([(8, *(20 + 3 * row + part for part in range(1, parts))) for row in range(ROWS_AT_ONCE)])
    shared = {"bf16": False, "max_length": 64, "per_device_train_batch_size": ROWS_AT_ONCE}

    def products(args: Mapping[str, object], phases: tuple[str, ...]) -> int:
        traced = trace(traced_training(TrainingPlan(name, {**shared, **args}), small_config(), small_tokenizer(), rows))
        run = [traced.phase(phase) for phase in phases]
        operators = [each for phase in run for each in traced.operators[phase.first_operator : phase.end_operator]]
        return sum(operator.work.kind is Kind.MATMUL for operator in operators)

    beside = products({}, asking)
    assert beside > 0
    assert products(PRECOMPUTED, (PRECOMPUTE,)) == beside


@pytest.mark.parametrize(
    ("widths", "rows"),
    [
        pytest.param([4000 if row % 40 == 0 else 100 for row in range(400)], 1, id="few long rows"),
        pytest.param([100] * 9, 8, id="a last micro-batch of one row"),
    ],
)
def test_the_time_of_a_pass_over_the_dataset_is_that_of_all_its_rows(
    widths: list[int], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide, blocks, now = np.array(widths), block_rows(len(widths), rows), [0.0]

    class Asked(OnTokenizedRows):
        def __init__(self) -> None:
            pass

        def _run_reference(self, dataset: Dataset, batch: Any) -> list[float]:
            now[0] += float(wide[batch].sum())
            return []

    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    asked = Asked()
    asked.precompute_sample(Dataset.from_dict({"row": widths}), "train", [], blocks, wide[blocks].max(axis=1), {})
    assert asked.seconds_per_row == pytest.approx(wide.mean())


def test_sizes_are_spread_as_all_of_them_are() -> None:
    sizes = np.random.default_rng(0).permutation(np.arange(1, 101))
    assert list(sizes[quantile_indices(sizes, 4)]) == [13, 38, 63, 88]
    assert sorted(quantile_indices(np.array([7, 5]), 4)) == [0, 1]
