"""The installed versions that a technique accepts as new enough."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.core.machine import Hardware, Machine
from autotune.techniques.versions import accepted_versions, installed
from tests.settings import GPU, setting
from tests.techniques.test_rules import SFT, candidate


@pytest.mark.parametrize(
    ("version", "range_", "inside"),
    [
        ("5.23.0", ">=5.23", True),
        ("5.23", ">=5.23.0", True),
        ("5.22.3", ">=5.23", False),
        ("5.100.0", ">=5.23", True),
        # A build from before the release need not have what the release has.
        ("5.23.0.dev0", ">=5.23", False),
        ("5.23.0rc1", ">=5.23", False),
        ("5.24.0.dev0", ">=5.23", True),
        # A build label does not affect the order.
        ("2.13.0+cpu", ">=2.13", True),
        ("2.12.1+cu130", ">=2.13", False),
        ("2.8.3.post1", ">=2.8.3", True),
        ("0.18.2", ">=0.18.2,<0.19", True),
        ("0.19.0", ">=0.18.2,<0.19", False),
        ("0.19.0.dev0", ">=0.18.2,<0.19", False),
        ("a build of ours", ">=0", False),
    ],
)
def test_a_version_lies_in_a_range(version: str, range_: str, inside: bool) -> None:
    machine = Machine(Hardware("cpu", "a CPU", 1), {"package": version})
    assert installed(machine, "package", range_) is inside


def test_what_is_not_installed_lies_in_no_range() -> None:
    assert not installed(Machine(Hardware("cpu", "a CPU", 1)), "package", ">=0")


@pytest.mark.parametrize(
    ("package", "version", "choices"),
    [
        ("bitsandbytes", "0.45.1", {"quantization": "4bit-nf4", "lora": "r16"}),
        ("bitsandbytes", "0.46.0", {"optimizer": "adamw_bnb_8bit"}),
        ("deepspeed", "0.19.3", {"sharding": "zero2"}),
        ("kernels", "0.19.0", {"hub_kernels": "on"}),
        ("kernels", "0.18.1", {"attention": "kernels-community/flash-attn2"}),
    ],
)
def test_a_package_in_a_version_that_is_refused_is_as_good_as_none(
    package: str, version: str, choices: dict[str, str]
) -> None:
    machine = replace(GPU, packages={**GPU.packages, package: version})
    here = setting(machine=machine, allowed=frozenset({"quantization", "lora", "optimizer"}))
    why = str(SFT.illegal(candidate(here, **choices), here))
    assert f"{package}{accepted_versions(package)} is needed" in why
    assert f"{version} is installed" in why


@pytest.mark.parametrize(("version", "reason"), [("1.13.0", "needs accelerate>=1.14"), ("1.14.0", "weights whole")])
def test_accelerate_leaves_packed_integers_out_of_fsdp2_since_a_release(version: str, reason: str) -> None:
    machine = replace(
        GPU, hardware=replace(GPU.hardware, processes=2), packages={**GPU.packages, "accelerate": version}
    )
    here = setting(machine=machine, allowed=frozenset({"quantization", "lora"}))
    sharded = candidate(here, sharding="fsdp2", quantization="4bit-nf4", lora="r16")
    assert reason in str(SFT.illegal(sharded, here))
