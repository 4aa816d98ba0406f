"""The rules of attention: which kernels a device, a model and the rows allow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.core.candidate import Choice
from autotune.core.machine import Machine
from autotune.core.workload import KeyValueCache
from autotune.techniques import find
from autotune.techniques.base import CrashReason
from autotune.techniques.versions import accepted_versions
from autotune.units import GIB
from tests.settings import GPU, separates, setting, workload
from tests.techniques.test_rules import SFT, candidate, evaluated


def test_flash_attention_does_not_compute_in_fp32() -> None:
    here = setting(machine=GPU)
    assert "bf16 or fp16" in str(SFT.illegal(candidate(here, attention="flash_attention_2", precision="float32"), here))


@pytest.mark.parametrize(
    ("choices", "heads", "legal"),
    [
        ({"gradient_checkpointing": "off"}, 8, False),
        ({"gradient_checkpointing": "every_2"}, 8, False),
        ({"gradient_checkpointing": "on"}, 8, True),
        ({"gradient_checkpointing": "selective"}, 8, True),
        ({"gradient_checkpointing": "off"}, 1, True),
        ({"gradient_checkpointing": "off", "attention": "sdpa"}, 8, True),
        ({"gradient_checkpointing": "off", "activation_offloading": "off"}, 8, True),
    ],
)
def test_flex_attention_of_several_heads_is_offloaded_only_where_layers_are_checkpointed(
    choices: dict[str, str], heads: int, legal: bool
) -> None:
    here = setting(machine=GPU, of=workload(attention_heads=heads))
    chosen = {"attention": "flex_attention", "activation_offloading": "on", **choices}
    reason = SFT.illegal(candidate(here, **chosen), here)
    assert (reason is None) is legal
    assert legal or "without their strides" in str(reason)


@pytest.mark.parametrize(
    ("lengths", "shared", "choices", "failing"),
    [
        ({100: 4, 2000: 4}, 2, {}, 100),
        # 60 queries of two heads are a block of 120.
        ({60: 4, 2000: 4}, 2, {}, None),
        ({60: 4, 2000: 4}, 4, {}, 60),
        ({100: 4, 2000: 4}, 1, {}, None),
        # Another row makes each micro-batch of eight wide enough.
        ({100: 4, 2000: 4}, 2, {"per_device_train_batch_size": 8}, None),
        ({100: 4, 2000: 4}, 2, {"pad_to_multiple_of": 128}, None),
        ({60: 4, 2000: 4}, 4, {"pad_to_multiple_of": 8}, 64),
    ],
)
def test_flex_attention_is_left_out_where_a_micro_batch_may_have_a_width_without_a_kernel(
    lengths: dict[int, int], shared: int, choices: dict[str, Choice], failing: int | None
) -> None:
    # tests/nullgpu/test_training.py has the failure.
    cache = KeyValueCache(layers=4, heads=16 // shared, elements=64)
    of = workload(lengths=lengths, attention_heads=16, grouped_heads=shared > 1, cache=cache)
    here = setting(machine=GPU, of=of)
    chosen = {"attention": "flex_attention", "per_device_train_batch_size": 4, "max_length": 2000, **choices}
    reason = SFT.illegal(candidate(here, **chosen), here)
    assert (f"at {failing} tokens" in str(reason)) if failing else reason is None


def test_an_attention_that_the_architecture_lacks_is_illegal_and_the_default_falls_back() -> None:
    refused = separates("sdpa").__class__("sdpa", False, False, None, 1e-4, "it has no sdpa")
    here = setting(of=workload(checks=(refused, separates("eager"))))
    assert candidate(here)["attention"] == "eager"
    assert "it has no sdpa" in str(SFT.illegal(candidate(here, attention="sdpa"), here))


def test_flex_attention_is_left_out_where_evaluation_may_have_a_width_without_a_kernel() -> None:
    of = evaluated({500: 64}, {100: 64})
    cache = KeyValueCache(layers=4, heads=4, elements=64)
    model = replace(of.model, attention_heads=16, grouped_heads=True, cache=cache)
    here = setting(machine=GPU, of=replace(of, model=model))
    assert "at 100 tokens" in str(SFT.illegal(candidate(here, attention="flex_attention"), here))


@pytest.mark.parametrize(("capability", "there"), [((8, 9), False), ((9, 0), True), ((10, 0), False), ((12, 0), False)])
@pytest.mark.parametrize(
    "choice", ["flash_attention_3", "kernels-community/flash-attn3", "kernels-community/vllm-flash-attn3"]
)
def test_flash_attention_3_is_for_hopper_alone(choice: str, capability: tuple[int, int], there: bool) -> None:
    packages = {
        **GPU.packages,
        "flash-attn-3": "3.0.0",
        "kernels": accepted_versions("kernels").split("=")[-1],
    }
    machine = replace(GPU, hardware=replace(GPU.hardware, compute_capability=capability), packages=packages)
    assert (find("attention", SFT.techniques).unavailable(choice, machine) is None) is there


def test_the_kernel_that_transformers_takes_in_place_of_a_package_is_named() -> None:
    from transformers.modeling_flash_attention_utils import FLASH_ATTN_KERNEL_FALLBACK

    attention = find("attention", SFT.techniques)
    packages = {name: version for name, version in GPU.packages.items() if not name.startswith("flash-attn")}
    hopper = replace(GPU.hardware, compute_capability=(9, 0))
    with_kernels = {**packages, "kernels": accepted_versions("kernels").split("=")[-1]}
    for choice, instead in FLASH_ATTN_KERNEL_FALLBACK.items():
        assert attention.parse(instead) == instead
        reason = attention.unavailable(choice, replace(GPU, hardware=hopper, packages=with_kernels))
        assert str(reason).endswith(
            f"is not installed, and transformers would use {instead}, which is a separate choice"
        )
        without = attention.unavailable(choice, replace(GPU, hardware=hopper, packages=packages | {"kernels": "0.1"}))
        assert str(without).endswith("is not installed")


def test_a_missing_package_is_a_conflict_where_the_training_is_for_this_machine() -> None:
    without = {name: version for name, version in GPU.packages.items() if not name.startswith("flash-attn")}
    elsewhere = replace(GPU, packages=without, planned=True)
    here = replace(elsewhere, host_bytes=64 * GIB)
    with_kernels = replace(here, packages={**without, "kernels": accepted_versions("kernels").split("=")[-1]})
    attention = find("attention", SFT.techniques)

    def conflict(machine: Machine, choice: str) -> str | None:
        at = setting(machine=machine)
        return attention.conflict(choice, candidate(at, attention=choice, precision="bfloat16"), at)

    for choice in ("flash_attention_2", "kernels-community/flash-attn2"):
        assert conflict(elsewhere, choice) is None
        assert isinstance(conflict(here, choice), CrashReason)
        assert "is not installed" in str(conflict(here, choice))
    # Training runs, with another kernel than the one that is named.
    reason = conflict(with_kernels, "flash_attention_2")
    assert "a separate choice" in str(reason)
    assert not isinstance(reason, CrashReason)
    assert conflict(with_kernels, "kernels-community/flash-attn2") is None


@pytest.mark.parametrize(
    ("versions", "kernels", "there"),
    [("<0.19,>=0.18.2", "0.18.2", True), ("<0.19,>=0.18.2", "0.16.2", False), ("<0.17,>=0.16.0", "0.16.2", True)],
)
def test_kernels_of_the_hub_need_the_versions_of_the_installed_transformers(
    monkeypatch: pytest.MonkeyPatch, versions: str, kernels: str, there: bool
) -> None:
    monkeypatch.setattr("autotune.techniques.versions.accepted_versions", lambda _: versions)
    machine = replace(GPU, packages={**GPU.packages, "kernels": kernels})
    for technique, choice in (("hub_kernels", "on"), ("attention", "kernels-community/flash-attn2")):
        reason = find(technique, SFT.techniques).unavailable(choice, machine)
        assert reason == (None if there else f"kernels{versions} is needed, and {kernels} is installed")


@pytest.mark.parametrize(("lacks", "left"), [("flex_attention", "flash_attention_2"), ("flash", "flex_attention")])
def test_attention_that_an_architecture_lacks_is_no_choice(lacks: str, left: str) -> None:
    of = workload()
    here = setting(machine=GPU, of=replace(of, model=replace(of.model, lacks_attention=(lacks,))))
    for choice in ("flex_attention", "flash_attention_2", "sdpa"):
        reason = find("attention", SFT.techniques).unsuitable(choice, here)
        assert (reason is None) is (choice in ("sdpa", left))
