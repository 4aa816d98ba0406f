"""Autocast on a traced GPU casts like CUDA's, which PyTorch registers even in builds without CUDA."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from autotune.virtual import UnsupportedError, trace
from autotune.virtual.cost.roofline import Kind
from autotune.virtual.patches.autocast import listed_operators

HALF = torch.bfloat16


def of(device: Any, *shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def cases(device: Any) -> dict[str, torch.dtype]:
    """Return the types of the results of some functions under autocast, by their names."""
    row, image = of(device, 2, 8), of(device, 1, 2, 4, 4)
    full = of(device, 2, 8, dtype=torch.float32)
    results = {
        "linear": functional.linear(full, of(device, 4, 8)),
        "rms_norm": functional.rms_norm(row, (8,)),
        "layer_norm": functional.layer_norm(row, (8,)),
        "vector_norm": torch.linalg.vector_norm(row),
        "matrix_norm": torch.linalg.matrix_norm(row),
        "bilinear": functional.interpolate(image, scale_factor=2.0, mode="bilinear"),
        "bicubic": functional.interpolate(image, scale_factor=2.0, mode="bicubic", antialias=True),
        "nearest": functional.interpolate(image, scale_factor=2.0),
        "soft_margin_loss": functional.soft_margin_loss(row, row),
        "margin_ranking_loss": functional.margin_ranking_loss(row, row, row),
        "cosine_embedding_loss": functional.cosine_embedding_loss(row, row, of(device, 2)),
        "softmax": functional.softmax(row, -1),
        "sum": row.sum(),
        "cross_entropy": functional.cross_entropy(row, of(device, 2, dtype=torch.int64)),
        "gelu": functional.gelu(row),
        "addcmul": torch.addcmul(row, full, row),
    }
    return {name: result.dtype for name, result in results.items()}


@contextmanager
def autocast(device_type: str) -> Iterator[None]:
    """Run the body under autocast, which ``torch.autocast`` refuses for CUDA where there is none."""
    before = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    torch.set_autocast_enabled(device_type, True)
    torch.set_autocast_dtype(device_type, HALF)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device_type, before[0])
        torch.set_autocast_dtype(device_type, before[1])


@pytest.fixture(scope="module")
def on_cuda() -> dict[str, torch.dtype]:
    with FakeTensorMode(), autocast("cuda"):
        return cases("cuda")


@pytest.fixture(scope="module")
def traced() -> dict[str, torch.dtype]:
    found: dict[str, torch.dtype] = {}

    def step(device: torch.device) -> None:
        with autocast(device.type):
            found.update(cases(device))

    trace(step)
    return found


def test_functions_have_the_types_that_they_have_on_cuda(
    on_cuda: dict[str, torch.dtype], traced: dict[str, torch.dtype]
) -> None:
    assert traced == on_cuda
    assert on_cuda["bilinear"] is torch.float32


def products_of(region: Callable[[torch.device], AbstractContextManager[object]]) -> list[tuple[str, ...]]:
    """Return the types of the tensors of a matrix product in a region."""

    def step(device: torch.device) -> None:
        with region(device):
            functional.linear(of(device, 2, 8, dtype=torch.float32), of(device, 4, 8, dtype=torch.float32))

    return [operator.dtypes for operator in trace(step).operators if operator.work.kind is Kind.MATMUL]


@pytest.mark.parametrize(
    ("region", "dtype"),
    [
        (lambda device: torch.autocast(device.type, HALF), "torch.bfloat16"),
        (lambda _: torch.autocast("cuda", HALF), "torch.bfloat16"),
        (lambda _: torch.autocast(device_type="cuda"), "torch.float16"),
        (lambda _: torch.autocast("cuda", HALF, enabled=False), "torch.float32"),
        (lambda _: torch.amp.autocast("cuda", dtype=HALF), "torch.bfloat16"),
    ],
)
def test_autocast_for_cuda_is_that_of_the_traced_device(
    region: Callable[[torch.device], AbstractContextManager[object]], dtype: str
) -> None:
    assert products_of(region) == [(dtype,) * 3]


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
def test_a_region_that_pytorch_turned_off_before_the_trace_is_refused() -> None:
    region = torch.autocast("cuda", HALF)

    with pytest.raises(UnsupportedError, match=r"made outside of the traced function\. Make it inside"):
        products_of(lambda _: region)


def test_a_gradient_scaler_for_cuda_is_that_of_the_traced_device() -> None:
    scalers = []
    trace(lambda _: scalers.extend([torch.amp.GradScaler("cuda"), torch.amp.GradScaler()]))

    assert [scaler.is_enabled() for scaler in scalers] == [True, True]


def test_a_release_without_a_list_of_operators_is_not_taken_for_one_that_casts_nothing() -> None:
    with pytest.raises(NotImplementedError, match="has no list AT_FORALL_OF_A_LATER_RELEASE"):
        listed_operators("AT_FORALL_OF_A_LATER_RELEASE")
