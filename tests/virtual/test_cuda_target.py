"""Traces for a GPU, with and without Triton; in a separate process, since the device stays registered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from autotune.probing import JobServer
from tests.virtual.alone import found_by

_SCRIPT = """
import json
import torch
from collections import Counter
from importlib.metadata import version
from packaging.version import Version
from tests.small import small_tokenizer
from tests.virtual.models import config_of
from autotune.core.plan import TrainingPlan
from autotune.step.run.traced_training import traced_training
from autotune.step.run.virtual_trainer import TracedRows
from autotune.virtual import trace
from autotune.virtual.steps.phases import step_name

CASES = {
    "stored": {},
    "checkpointed": {"gradient_checkpointing": True},
    "every second": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"every_n_layers": 2}},
    "packed": {"packing": True},
    "turing": {},
    "hopper": {},
    "experts": {"model": {"dtype": "bfloat16"}},
    "experts, hopper": {"model": {"dtype": "bfloat16"}},
    "experts, turing": {"model": {"dtype": "bfloat16"}},
    "half": {"bf16": False, "fp16": True},
    "half, 8 bit": {"bf16": False, "fp16": True, "optim": "adamw_bnb_8bit"},
    "8 bit": {"optim": "adamw_bnb_8bit"},
    "flex, padded": {"attention": "flex_attention"},
    "flex, packed": {"attention": "flex_attention", "packing": True},
    "flash, checkpointed": {"attention": "flash_attention_2", "gradient_checkpointing": True},
    "flash, selective": {
        "attention": "flash_attention_2",
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"selective": True},
    },
    "flash, falcon": {"attention": "flash_attention_2"},
    "offloaded": {"activation_offloading": True, "max_length": 60},
    "offloaded, checkpointed": {
        "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"offload": True}, "max_length": 60,
    },
    "4 bit, few rows": {"model": {"load_in_4bit": True, "use_peft": True}},
    "4 bit, many rows": {"model": {"load_in_4bit": True, "use_peft": True}, "per_device_train_batch_size": 16},
    "4 bit, dora": {"model": {"load_in_4bit": True, "use_peft": True, "use_dora": True, "lora_r": 8,
                              "lora_target_modules": "all-linear"}},
}
if Version(version("transformers")) < Version("5.17"):
    del CASES["offloaded, checkpointed"]
CAPABILITIES = {"turing": (7, 5), "hopper": (9, 0)}
OTHERS = [(7, 5), (8, 6), (9, 0), (10, 0), (12, 0)]
found = {}
for name, args in CASES.items():
    args = {"per_device_train_batch_size": 2, "max_length": 64, "gradient_checkpointing": False, "bf16": True, **args}
    rows = TracedRows([(30,)] * 4 if "packed" in name else [(64,), (40,)] if "padded" in name else [(64,)])
    architecture = "falcon" if "falcon" in name else "qwen3_moe" if "experts" in name else "llama"
    model = {"attn_implementation": args.pop("attention", "sdpa"), **args.pop("model", {})}
    plan = TrainingPlan("sft", args=args, model=model)
    steps = traced_training(plan, config_of(architecture, num_hidden_layers=2), small_tokenizer(), rows)
    traced = trace(steps, capability=CAPABILITIES.get(name.split()[-1], (8, 0)), others=OTHERS)
    phase = traced.phase(step_name(1))
    operators = traced.operators[phase.first_operator : phase.end_operator]
    found[name] = {
        "device": phase.device_peak.bytes,
        "activation": phase.device_peak.categories.get("activation", 0),
        "optimizer state": phase.device_peak.categories.get("optimizer state", 0),
        "operators": Counter(operator.name for operator in operators),
        "squares": sum(shape[-2:] == (120, 120) for operator in operators for shape in operator.shapes),
        "assumptions": dict(traced.assumptions),
        "alike": sorted(traced.alike),
        "grouped flops": sum(operator.work.flops for operator in operators if "grouped_mm" in operator.name),
        "waits": sum(operator.work.kind == "synchronize" for operator in operators if "grouped_mm" in operator.name),
        "copies beside": [
            operator.work.on_side_stream
            for operator in operators
            if operator.work.kind in ("copy to device", "copy to host") and not operator.work.waits
        ],
        "sizes on the host": sorted(
            event.change_bytes
            for event in traced.events[phase.first_event : phase.end_event]
            if event.place == "host" and event.change_bytes > 8192
        ),
        "float32 products": sum(
            operator.name == "aten.mm.default" and set(operator.dtypes) != {"torch.bfloat16"} for operator in operators
        ),
    }


def addresses(device):
    held = [torch.empty(4, device=device) for _ in range(99)]
    found["addresses"] = sorted(tensor.untyped_storage().data_ptr() for tensor in held)
    # Each is gone before the next is made, so that the host's allocator may use its place again.
    found["successive"] = [torch.empty(4, device=device).untyped_storage().data_ptr() for _ in range(99)]


def pinned(device):
    size = 3 << 20
    made = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    assert made.is_pinned() and made.pin_memory() is made
    assert torch.empty(size, dtype=torch.uint8).pin_memory().is_pinned()
    there = torch.empty(size, dtype=torch.uint8, device=device)
    held = [made, there.to("cpu"), there.to("cpu", non_blocking=True)]
    held[0].copy_(there)


found["host"] = trace(pinned).host_peak.bytes
trace(addresses)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(job_server: JobServer) -> dict[str, Any]:
    return dict(found_by(job_server, _SCRIPT))


def test_attention_without_a_mask_is_flash_attention(found: dict[str, Any]) -> None:
    assert "aten._scaled_dot_product_flash_attention.default" in found["stored"]["operators"]


def test_before_ampere_grouped_heads_leave_the_plain_products_alone(found: dict[str, Any]) -> None:
    assert not any("flash" in name or "efficient" in name for name in found["turing"]["operators"])
    assert "aten._softmax.default" in found["turing"]["operators"]


def test_packed_rows_need_a_mask_and_so_efficient_attention(found: dict[str, Any]) -> None:
    assert "aten._scaled_dot_product_efficient_attention.default" in found["packed"]["operators"]


def test_autocast_multiplies_in_half_precision_alone(found: dict[str, Any]) -> None:
    assert found["stored"]["float32 products"] == 0


def test_checkpointing_keeps_fewer_activations_the_more_layers_it_covers(found: dict[str, Any]) -> None:
    stored, some, every = (found[name]["activation"] for name in ("stored", "every second", "checkpointed"))
    assert every < some < stored


def test_on_hopper_attention_is_cudnns(found: dict[str, Any]) -> None:
    assert "aten._scaled_dot_product_cudnn_attention.default" in found["hopper"]["operators"]


@pytest.mark.parametrize(("case", "in_bf16"), [("half", "stored"), ("half, 8 bit", "8 bit")])
def test_in_float16_gradients_are_unscaled_and_the_optimizer_steps(
    found: dict[str, Any], case: str, in_bf16: str
) -> None:
    half = found[case]

    assert "aten._amp_foreach_non_finite_check_and_unscale_.default" in half["operators"]
    assert half["optimizer state"] == found[in_bf16]["optimizer state"] > 0
    assert "scaled gradients are finite" in half["assumptions"]


def test_experts_are_multiplied_one_after_another_but_on_hopper_and_blackwell_of_data_centres(
    found: dict[str, Any],
) -> None:
    ampere, hopper, turing = (found[case] for case in ("experts", "experts, hopper", "experts, turing"))
    grouped = "aten._grouped_mm.default"
    fallback = ("transformers.grouped_mm_fallback.default", "transformers.grouped_mm_fallback_backward.default")

    assert hopper["waits"] == 0
    # Four experts, and for each product one wait.
    assert ampere["waits"] == hopper["operators"][grouped]
    assert ampere["operators"][grouped] == (4 + 1) * hopper["operators"][grouped]
    assert ampere["grouped flops"] == hopper["grouped flops"] > 0
    assert ampere["alike"] == [[8, 6], [12, 0]]
    assert hopper["alike"] == [[9, 0], [10, 0]]
    assert turing["alike"] == [[7, 5]]
    assert grouped not in turing["operators"]
    # Transformers' own waits once for both products of the backward pass, which is an operator from 5.17 on.
    if fallback[1] in turing["operators"]:
        assert turing["waits"] == 2 / 3 * hopper["operators"][grouped]
        assert sum(turing["operators"][name] for name in fallback) == turing["waits"] + 4 * hopper["operators"][grouped]
        assert turing["grouped flops"] == hopper["grouped flops"]


def test_in_float16_three_numbers_more_are_held(found: dict[str, Any]) -> None:
    # The scale, how long it has been good, and the scaled loss, in 4 bytes each.
    assert found["half"]["device"] - found["stored"]["device"] == 12


@pytest.mark.parametrize("case", ["flex, padded", "flex, packed"])
def test_flex_attention_takes_rows_of_every_kind(found: dict[str, Any], case: str) -> None:
    operators = found[case]["operators"]

    assert operators["autotune_flex_attention.forward.default"] > 0
    assert operators["autotune_flex_attention.backward.default"] > 0


def test_flex_attention_keeps_packed_documents_apart_without_a_mask_of_tokens(found: dict[str, Any]) -> None:
    assert found["packed"]["squares"] > 0
    assert found["flex, packed"]["squares"] == 0


def test_weight_norms_of_dora_are_those_of_the_expanded_4_bit_weights(found: dict[str, Any]) -> None:
    assert found["4 bit, dora"]["operators"]["bitsandbytes.dequantize_4bit.default"] > 0


def test_weights_in_4_bits_are_expanded_first_for_many_rows(found: dict[str, Any]) -> None:
    few, many = (found[f"4 bit, {case} rows"]["operators"] for case in ("few", "many"))
    products, expanded = "bitsandbytes.gemm_4bit.default", "bitsandbytes.dequantize_4bit.default"

    assert products not in many
    assert many[expanded] == few[expanded] + few[products]


def test_models_that_look_for_flash_attention_as_they_are_imported_find_it(found: dict[str, Any]) -> None:
    assert found["flash, falcon"]["operators"]["autotune_flash_attn.forward.default"] > 0


def test_selective_checkpointing_computes_flash_attention_once(found: dict[str, Any]) -> None:
    again, once = (
        found[case]["operators"]["autotune_flash_attn.forward.default"]
        for case in ("flash, checkpointed", "flash, selective")
    )

    assert again == 2 * once
    assert found["flash, selective"]["activation"] > found["flash, checkpointed"]["activation"]


def test_the_address_of_a_storage_is_that_of_no_view_of_another(found: dict[str, Any]) -> None:
    # Activation offloading adds the place of a view, in elements, to the address of its storage.
    assert min(later - earlier for earlier, later in pairwise(found["addresses"])) > 2**40


def test_no_storage_gets_the_address_of_one_that_is_gone(found: dict[str, Any]) -> None:
    # TRL takes a tensor at the address of one that it has just offloaded for the same, and keeps it on the device.
    assert len(set(found["successive"])) == len(found["successive"])


def test_pinned_memory_is_held_in_powers_of_two(found: dict[str, Any]) -> None:
    assert found["host"] == (4 + 3 + 4) << 20
    for case in (case for case in found if case.startswith("offloaded")):
        sizes = found[case]["sizes on the host"]
        assert sizes
        assert all(size.bit_count() == 1 for size in sizes)


def test_trl_offloads_beside_the_operators_and_checkpointing_between_them(found: dict[str, Any]) -> None:
    if "offloaded, checkpointed" not in found:
        pytest.skip("transformers offloads what is checkpointed from version 5.17 on")
    copies = {case: found[case]["copies beside"] for case in ("offloaded", "offloaded, checkpointed")}

    assert sum(copies["offloaded"]) > 0.9 * len(copies["offloaded"]) > 0
    assert copies["offloaded, checkpointed"]
    assert not any(copies["offloaded, checkpointed"])


_WITH_TRITON = """
import json, sys
from collections import Counter
if sys.argv[1] == "missing":
    sys.modules["triton"] = None
from tests.small import small_tokenizer
from tests.virtual.models import config_of
from autotune.core.plan import TrainingPlan
from autotune.core.step_time import Caller
from autotune.step.run.traced_training import traced_training
from autotune.step.run.virtual_trainer import TracedRows
from autotune.virtual import trace

args = {"per_device_train_batch_size": 2, "max_length": 64, "bf16": True}
steps = traced_training(TrainingPlan("sft", args=args), config_of("llama"), small_tokenizer(), TracedRows([(64,)]))
traced = trace(steps)
names = Counter(operator.name for operator in traced.operators)
for operator in traced.operators:
    assert (operator.work.caller is Caller.LIBRARY) == operator.name.startswith("triton.")
print(json.dumps({"bytes": [event.change_bytes for event in traced.events], "operators": names}))
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_without_triton_a_trace_is_what_it_is_with_it() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(Path(__file__).parents[2])}

    def traced(triton: str) -> Any:
        command = [sys.executable, "-W", "ignore", "-c", _WITH_TRITON, triton]
        printed = subprocess.check_output(command, text=True, env=environment)
        return json.loads(printed.splitlines()[-1])

    missing = traced("missing")
    assert missing["operators"]["triton._forward_kernel"] > 0
    assert missing == traced("installed")
