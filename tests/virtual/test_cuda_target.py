"""Traces for a GPU, in a process of their own because the device stays registered in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_SCRIPT = """
import json, sys
from tests.small import small_tokenizer
from tests.virtual.models import config_of
from autotune.core.plan import TrainingPlan
from autotune.step.traced_training import TracedRows, step_name, traced_training
from autotune.virtual import trace

CASES = {
    "stored": {},
    "checkpointed": {"gradient_checkpointing": True},
    "every second": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"every_n_layers": 2}},
    "offloaded": {"activation_offloading": True},
    "packed": {"packing": True},
    "turing": {},
}
found = {}
for name, args in CASES.items():
    args = {"per_device_train_batch_size": 2, "max_length": 64, "gradient_checkpointing": False, "bf16": True, **args}
    rows = TracedRows([32] * 4 if name == "packed" else [64])
    steps = traced_training(TrainingPlan("sft", args=args), config_of("llama"), small_tokenizer(), rows)
    traced = trace(steps, capability=(7, 5) if name == "turing" else (8, 0))
    phase = traced.phase(step_name(1))
    operators = traced.operators[phase.first_operator : phase.end_operator]
    found[name] = {
        "device": phase.device_peak.bytes,
        "host": phase.host_peak.bytes,
        "activation": phase.device_peak.categories.get("activation", 0),
        "operators": sorted({operator.name for operator in operators}),
        "float32 products": sum(
            operator.name == "aten.mm.default" and set(operator.dtypes) != {"torch.bfloat16"} for operator in operators
        ),
    }
json.dump(found, open(sys.argv[1], "w"))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("virtual") / "found.json"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-W", "ignore", "-c", _SCRIPT, str(file)], check=True, env=environment, timeout=200)
    return dict(json.loads(file.read_text()))


def test_attention_without_a_mask_is_flash_attention(found: dict[str, Any]) -> None:
    assert "aten._scaled_dot_product_flash_attention.default" in found["stored"]["operators"]


def test_before_ampere_grouped_heads_leave_the_plain_products_alone(found: dict[str, Any]) -> None:
    assert not any("flash" in name or "efficient" in name for name in found["turing"]["operators"])
    assert "aten._safe_softmax.default" in found["turing"]["operators"]


def test_packed_rows_need_a_mask_and_so_efficient_attention(found: dict[str, Any]) -> None:
    assert "aten._scaled_dot_product_efficient_attention.default" in found["packed"]["operators"]


def test_autocast_multiplies_in_half_precision_alone(found: dict[str, Any]) -> None:
    assert found["stored"]["float32 products"] == 0


def test_checkpointing_keeps_fewer_activations_the_more_layers_it_covers(found: dict[str, Any]) -> None:
    stored, some, every = (found[name]["activation"] for name in ("stored", "every second", "checkpointed"))
    assert every < some < stored


def test_offloading_moves_activations_to_the_host(found: dict[str, Any]) -> None:
    moved = found["stored"]["activation"] - found["offloaded"]["activation"]
    assert moved > 0
    assert found["offloaded"]["host"] - found["stored"]["host"] >= 0.9 * moved
