"""The figures of null GPUs are those of the catalogue, in CUDA's form."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from autotune.errors import InputError
from autotune.inspection.gpus import find_gpu
from autotune.nullgpu.devices import null_device, null_device_names
from autotune.units import GIB, KIB, MIB


@pytest.mark.parametrize("name", null_device_names())
def test_a_device_has_the_memory_of_the_catalogue_and_the_name_that_means_it(name: str) -> None:
    gpu, device = find_gpu(name), null_device(name)
    assert find_gpu(device.name) == gpu
    assert device.total == gpu.memory_bytes
    # CUDA takes memory in pages of 2 MiB.
    assert gpu.context_bytes <= device.context < gpu.context_bytes + 2 * MIB
    assert (device.major, device.minor) == gpu.compute_capability
    # The driver keeps a few hundred MiB; a larger difference is a mistyped total.
    assert 200 * MIB < device.reserved < 1400 * MIB


def test_the_gpus_that_are_rented_most_can_be_stood_in_for() -> None:
    assert {"H100-SXM", "A100-80GB", "RTX4090", "B200", "T4"} <= set(null_device_names())


def test_clocks_follow_from_the_peaks() -> None:
    # NVIDIA's data sheets: 1,410 MHz and 1,593 MHz for the A100, 2,520 MHz for the RTX 4090.
    a100, ada = null_device("A100-80GB"), null_device("RTX4090")
    assert a100.clock_khz == pytest.approx(1_410_000, rel=0.001)
    assert a100.memory_clock_khz == pytest.approx(1_593_000, rel=0.001)
    assert ada.clock_khz == pytest.approx(2_520_000, rel=0.001)


def test_a_size_is_a_device_with_that_memory() -> None:
    small, like = null_device("24GiB"), null_device("H100-SXM")
    assert small.total == 24 * GIB
    assert (small.multiprocessors, small.shared_per_block) == (like.multiprocessors, 227 * KIB)
    assert null_device("H100-SXM", 8 * GIB).total == 8 * GIB


@pytest.mark.parametrize("word", ["MI300X", "V100-16GB"])
def test_a_gpu_that_cannot_be_stood_in_for_is_refused_with_those_that_can(word: str) -> None:
    with pytest.raises(InputError, match=rf"no null GPU for {word}.*H100-SXM"):
        null_device(word)


def test_the_shim_reads_a_device_from_one_line() -> None:
    device = null_device("T4")
    fields = dict(field.split("=") for field in device.text().split(";"))
    assert fields == {name: str(value) for name, value in asdict(device).items()}
