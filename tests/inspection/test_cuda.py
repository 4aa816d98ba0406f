"""The choice of a GPU among those of the driver, and the driver's figures."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest
import torch

from autotune.core.machine import Hardware
from autotune.inspection.cpu import cpu
from autotune.inspection.cuda import BY_ADDRESS, NoGpuError, nvidia_cards, visible_gpus
from autotune.units import GIB


@dataclass(frozen=True)
class Card:
    """A device of the driver below; a MIG instance names its parent."""

    name: str
    uuid: str
    parent: Card | None = None


CARDS = [Card("Small GPU", "GPU-11aa"), Card("Large GPU", "GPU-22bb")]
SLICE = Card("Large GPU MIG 1g.10gb", "MIG-33cc", CARDS[1])
UNIFIED = Card("Unified GPU", "GPU-44dd")


class Driver(SimpleNamespace):
    """NVML as far as it is used, with two cards and one MIG instance; keeps whether it was shut down.

    Attributes:
        split: cards with MIG enabled.
        instances: of each of them, by their index.
    """

    NVMLError = pynvml.NVMLError
    NVMLError_NotSupported = pynvml.NVMLError_NotSupported
    nvmlMemory_v2 = pynvml.nvmlMemory_v2

    def __init__(self, cards: list[Card]) -> None:
        super().__init__()
        self.cards = cards
        self.running = False
        self.split: list[Card] = []
        self.instances: list[Card | None] = [None, SLICE, None]

    def nvmlDeviceGetMigMode(self, card: Card) -> list[int]:
        if card.parent is not None or card == CARDS[0]:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [int(card in self.split), 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, card: Card) -> int:
        return len(self.instances)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card: Card, index: int) -> Card:
        found = self.instances[index]
        if found is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return found

    def nvmlInit(self) -> None:
        self.running = True

    def nvmlShutdown(self) -> None:
        self.running = False

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Card:
        return self.cards[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Card:
        if uuid != SLICE.uuid:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return SLICE

    def nvmlDeviceGetUUID(self, card: Card) -> str:
        return card.uuid

    def nvmlDeviceGetName(self, card: Card) -> str:
        return card.name

    def nvmlDeviceIsMigDeviceHandle(self, card: Card) -> bool:
        return card.parent is not None

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, card: Card) -> Card:
        assert card.parent is not None
        return card.parent

    def nvmlDeviceGetMemoryInfo(self, card: Card, version: int) -> SimpleNamespace:
        assert version == pynvml.nvmlMemory_v2
        if card in self.split:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
        if card == UNIFIED:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(total=24 * GIB, reserved=GIB, used=2 * GIB, free=21 * GIB)

    def nvmlDeviceGetCudaComputeCapability(self, card: Card) -> list[int]:
        if card.parent is not None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [9, 0]

    def nvmlSystemGetDriverVersion(self) -> str:
        return "600.10"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    made = Driver(CARDS)
    monkeypatch.setattr("autotune.inspection.cuda.pynvml", made)
    return made


def test_the_memory_that_the_driver_keeps_for_itself_does_not_count(driver: Driver) -> None:
    assert visible_gpus()[0] == Hardware(
        kind="cuda",
        name="Small GPU",
        memory_bytes=23 * GIB,
        used_by_others_bytes=2 * GIB,
        compute_capability=(9, 0),
        driver="600.10",
        variables=BY_ADDRESS,
    )
    assert not driver.running


@pytest.mark.parametrize(
    ("visible", "name"),
    [
        ("0", "Small GPU"),
        ("1,0", "Large GPU"),
        (" 1 ", "Large GPU"),
        ("GPU-22bb", "Large GPU"),
        ("GPU-2,GPU-1", "Large GPU"),
        ("MIG-33cc", "Large GPU MIG 1g.10gb"),
    ],
)
@pytest.mark.usefixtures("driver")
def test_the_first_visible_device_is_taken(monkeypatch: pytest.MonkeyPatch, visible: str, name: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_gpus()[0].name == name


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["Small GPU", "Large GPU"]),
        ("1,0", ["Large GPU", "Small GPU"]),
        ("1,GPU-1", ["Large GPU", "Small GPU"]),
        # CUDA stops at the first that is not there.
        ("0,7,1", ["Small GPU"]),
    ],
)
@pytest.mark.usefixtures("driver")
def test_every_visible_device_is_known_in_its_order(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, names: list[str]
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.name for gpu in visible_gpus()] == names


@pytest.mark.parametrize(
    ("others", "variables"), [([], ""), ([replace(CARDS[0], uuid="GPU-5")], ""), ([CARDS[1]], BY_ADDRESS)]
)
def test_cards_that_differ_have_the_variable_with_which_cuda_counts_like_the_driver(
    monkeypatch: pytest.MonkeyPatch, driver: Driver, others: list[Card], variables: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    driver.cards = [CARDS[0], *others]
    assert [gpu.variables for gpu in visible_gpus()] == [variables]


# As the kernel has them: a display controller, a 3D controller, the audio function of a card, an NVSwitch, another's.
@pytest.mark.parametrize(
    ("files", "cards"),
    [
        ({"sys/bus/pci/devices/0000:01:00.0": ("0x10de", "0x030000")}, ("0000:01:00.0",)),
        ({"sys/bus/pci/devices/0000:02:00.0": ("0x10de", "0x030200")}, ("0000:02:00.0",)),
        ({"sys/bus/pci/devices/0000:01:00.1": ("0x10de", "0x040300")}, ()),
        ({"sys/bus/pci/devices/0000:05:00.0": ("0x10de", "0x068000")}, ()),
        ({"sys/bus/pci/devices/0000:00:02.0": ("0x8086", "0x030000")}, ()),
        ({"proc/driver/nvidia/gpus/0000:03:00.0": ()}, ("0000:03:00.0",)),
        ({"dev/nvidia0": (), "dev/nvidiactl": ()}, ("/dev/nvidia0",)),
        ({"dev/nvidia-uvm": ()}, ()),
        ({}, ()),
    ],
)
def test_a_card_is_seen_without_its_driver(
    tmp_path: Path, files: dict[str, tuple[str, ...]], cards: tuple[str, ...]
) -> None:
    for name, values in files.items():
        (tmp_path / name).mkdir(parents=True)
        for file, value in zip(("vendor", "class"), values, strict=False):
            (tmp_path / name / file).write_text(f"{value}\n")
    assert nvidia_cards(tmp_path) == cards


@pytest.mark.parametrize("visible", [None, "0", "GPU-22bb", "MIG-33cc"])
def test_a_card_that_is_divided_is_its_first_instance(
    monkeypatch: pytest.MonkeyPatch, driver: Driver, visible: str | None
) -> None:
    driver.cards = driver.split = [CARDS[1], UNIFIED]
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.name for gpu in visible_gpus()] == [SLICE.name]
    driver.instances = []
    if visible != "MIG-33cc":
        with pytest.raises(NoGpuError, match="MIG is enabled, and there is no instance"):
            visible_gpus()


def test_a_gpu_without_memory_of_its_own_has_the_host_s(driver: Driver) -> None:
    driver.cards = [UNIFIED]
    (found,) = visible_gpus()
    assert (found.kind, found.memory_bytes) == ("cuda", cpu().memory_bytes)
    assert 0 < found.available_bytes < found.memory_bytes


# A prefix of several UUIDs names none, and CUDA sees none if one is named twice (torch.cuda, `_parse_visible_devices`).
@pytest.mark.parametrize(
    "visible", ["", "-1", "2", "GPU-99", "nonsense", "-1,0", "GPU-", "0,0", "0,GPU-11", "MIG-33cc,MIG-33cc"]
)
def test_no_device_may_be_visible(monkeypatch: pytest.MonkeyPatch, driver: Driver, visible: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(NoGpuError, match=f"CUDA_VISIBLE_DEVICES='{visible}' leaves no device visible"):
        visible_gpus()
    assert not driver.running


@pytest.mark.usefixtures("driver")
def test_what_the_driver_refuses_is_a_reason_and_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-unknown")
    with pytest.raises(NoGpuError, match="failed to describe the device"):
        visible_gpus()


def test_a_driver_may_know_no_device(driver: Driver) -> None:
    driver.cards = []
    with pytest.raises(NoGpuError, match="reports no device"):
        visible_gpus()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_a_machine_without_a_driver_is_told_as_such() -> None:
    with pytest.raises(NoGpuError, match="driver"):
        visible_gpus()
