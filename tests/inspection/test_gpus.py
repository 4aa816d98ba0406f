"""The catalogue of GPUs is complete and has sources, and a user's word selects the right GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.core.gpu import Gpu
from autotune.core.machine import Hardware
from autotune.errors import InputError
from autotune.inspection.gpus import UNMEASURED_CONTEXT_BYTES, find_gpu, gpus, present_gpu
from autotune.units import GIB, MIB

PROMISED = {
    "T4", "V100-16GB", "V100-32GB", "RTX3090", "RTX4090", "RTX5090", "A10", "L4", "L40S", "A100-40GB", "A100-80GB",
    "H100-PCIe", "H100-SXM", "H100-NVL", "H200", "B200", "MI300X", "V100-PCIe-16GB", "V100-PCIe-32GB",
    "A100-PCIe-40GB", "A100-PCIe-80GB", "A10G", "RTXA6000", "RTX6000Ada",
}  # fmt: skip
ROOT = Path(__file__).parents[2]
EVERY = pytest.mark.parametrize("gpu", gpus(), ids=lambda gpu: gpu.name)


def test_the_catalogue_has_every_gpu_that_is_promised() -> None:
    assert {gpu.name for gpu in gpus()} >= PROMISED


def test_no_name_means_two_gpus() -> None:
    meanings: dict[str, set[str]] = {}
    for gpu in gpus():
        for name in (gpu.name, *gpu.aliases):
            meanings.setdefault("".join(filter(str.isalnum, name.lower())), set()).add(gpu.name)
    assert [name for name, meant in meanings.items() if len(meant) > 1] == []


@EVERY
def test_every_row_says_where_its_figures_come_from(gpu: Gpu) -> None:
    assert gpu.memory_source.startswith("https://")
    assert gpu.speeds is None or gpu.speeds.source.startswith("https://")
    named = gpu.context_source.startswith("https://") or (ROOT / gpu.context_source).is_file()
    assert named if gpu.context_source else gpu.context_bytes == UNMEASURED_CONTEXT_BYTES


def test_memory_is_what_can_be_allocated_and_not_what_is_printed_on_the_box() -> None:
    assert [gpu.name for gpu in gpus() if gpu.memory_kind != "usable"] == ["MI300X"]


@pytest.mark.parametrize(
    ("name", "total_mib"),
    # What nvidia-smi shows as the total of each card.
    [
        ("T4", 15360),
        ("V100-32GB", 32768),
        ("RTX3090", 24576),
        ("RTX4090", 24564),
        ("A10G", 23028),
        ("RTX6000Ada", 46068),
        ("L4", 23034),
        ("A100-80GB", 81920),
        ("H100-SXM", 81559),
        ("H200", 143771),
        ("B200", 183359),
    ],
)
def test_somewhat_less_than_the_drivers_total_can_be_allocated(name: str, total_mib: int) -> None:
    assert 0.96 < find_gpu(name).memory_bytes / (total_mib * MIB) < 1.0


def test_a_gpu_that_is_here_has_its_own_memory_and_the_catalogues_speeds() -> None:
    here = Hardware("cuda", "NVIDIA H100 80GB HBM3", 70 * GIB, compute_capability=(9, 0))
    gpu = present_gpu(here)
    assert (gpu.name, gpu.memory_bytes, gpu.memory_kind) == ("H100-SXM", 70 * GIB, "usable")
    assert gpu.speeds == find_gpu("H100").speeds


def test_a_gpu_that_is_here_and_in_no_catalogue_has_no_known_speeds() -> None:
    here = Hardware("cuda", "NVIDIA Strange 9000", 40 * GIB, compute_capability=(8, 6))
    gpu = present_gpu(here)
    assert (gpu.name, gpu.memory_bytes, gpu.compute_capability, gpu.speeds) == (here.name, 40 * GIB, (8, 6), None)


@pytest.mark.parametrize("name", ["H100-PCIe", "H100-NVL", "H200", "B200"])
def test_no_gpu_since_hopper_is_planned_with_a_smaller_context_than_was_measured_there(name: str) -> None:
    assert find_gpu(name).context_bytes >= find_gpu("H100-SXM").context_bytes


@EVERY
def test_more_gpus_reach_more_of_their_links_only_where_a_switch_joins_them(gpu: Gpu) -> None:
    if gpu.speeds is None:
        return
    switched = gpu.speeds.nvlink is not None and gpu.speeds.bridged is None
    # A bridge joins two.
    shares = [gpu.speeds.achieved.link_share(count) for count in ((2, 4, 8) if switched else (4, 8))]
    assert shares == sorted(shares, reverse=not switched)


@EVERY
def test_every_row_has_figures_of_the_right_order(gpu: Gpu) -> None:
    assert 8 * GIB < gpu.memory_bytes < 300 * GIB
    assert GIB // 10 < gpu.context_bytes < GIB
    if gpu.speeds is None:
        return
    speeds = gpu.speeds
    assert 2e11 < speeds.bandwidth < 1e13
    assert 5e12 < speeds.fp32 < 2e14
    assert speeds.fp32 <= speeds.fp16 < 5e15
    assert speeds.bf16 in (None, speeds.fp16)
    assert speeds.tf32 is None or speeds.tf32 == pytest.approx(speeds.fp16 / 2, rel=0.03)
    assert 1e10 < speeds.pcie < 1e11
    assert speeds.nvlink is None or speeds.pcie < speeds.nvlink < 1e12
    # Tensor cores learned bfloat16 and TF32 with compute capability 8.
    assert gpu.compute_capability is not None
    assert (speeds.bf16 is None) == (speeds.tf32 is None) == (gpu.compute_capability < (8, 0))


def test_the_gpu_without_known_speeds_is_marked_unverified() -> None:
    assert [gpu.name for gpu in gpus() if gpu.speeds is None] == ["MI300X"]
    assert [gpu.name for gpu in gpus() if not gpu.verified] == ["MI300X"]


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("H100-80GB", "H100-SXM"),
        ("h100 sxm", "H100-SXM"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("RTX4090", "RTX4090"),
        ("rtx 4090", "RTX4090"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("4090", "RTX4090"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("Tesla T4", "T4"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIe-40GB"),
        ("Tesla V100-PCIE-16GB", "V100-PCIe-16GB"),
        ("Tesla V100-PCIE-32GB", "V100-PCIe-32GB"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA A10G", "A10G"),
        ("RTX A6000", "RTXA6000"),
        ("A6000", "RTXA6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX6000Ada"),
        ("RTX 6000 Ada", "RTX6000Ada"),
    ],
)
def test_names_are_found_however_they_are_written(word: str, name: str) -> None:
    assert find_gpu(word).name == name


@pytest.mark.parametrize(
    ("word", "size"), [("24GiB", 24 * GIB), ("80 GB", 80 * 10**9), ("0.5TiB", 512 * GIB), (24 * GIB, 24 * GIB)]
)
def test_a_size_is_a_gpu_with_that_memory_and_no_known_speeds(word: str | int, size: int) -> None:
    gpu = find_gpu(word)
    assert (gpu.memory_bytes, gpu.memory_kind, gpu.speeds) == (size, "given", None)


@pytest.mark.parametrize(
    ("word", "close"),
    [
        ("A100", ["A100-40GB", "A100-80GB"]),
        ("V100", ["V100-16GB", "V100-32GB"]),
        ("RTX4080", ["RTX4090"]),
        ("4080", ["RTX4090"]),
    ],
)
def test_an_unknown_name_is_answered_with_the_closest_ones(word: str, close: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        find_gpu(word)
    assert word in caught.value.message
    for name in close:
        assert name in caught.value.hint
    assert "T4" not in caught.value.hint


def test_a_name_that_is_like_none_is_answered_with_all_of_them() -> None:
    with pytest.raises(InputError) as caught:
        find_gpu("quantum")
    assert all(gpu.name in caught.value.hint for gpu in gpus())


@pytest.mark.parametrize("word", ["24", "24 apples", "-3GiB", "", "0GiB", "24b", "9" * 400 + "GiB"])
def test_what_is_neither_a_name_nor_a_size_is_refused(word: str) -> None:
    with pytest.raises(InputError):
        find_gpu(word)


def test_float32_uses_the_tensor_cores_only_where_tf32_is_allowed() -> None:
    speeds = find_gpu("A100-80GB").speeds
    assert speeds is not None
    assert (speeds.peak("float32"), speeds.peak("float32", allow_tf32=True)) == (19.5e12, 156e12)


def test_bfloat16_without_tensor_cores_for_it_runs_at_the_rate_of_float32() -> None:
    speeds = find_gpu("T4").speeds
    assert speeds is not None
    assert (speeds.peak("bfloat16"), speeds.peak("float16")) == (8.1e12, 65e12)
