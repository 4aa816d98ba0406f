"""The values that are computed during a trace, and those that are not, since they would not be kept."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autotune.probing import JobServer
from autotune.virtual import trace, trace_inputs
from autotune.virtual.operators.known import Knowledge, known, set_known
from tests.virtual.alone import apart

_NOT_BEFORE = torch.ops.aten.ge.Tensor
_HALVED = torch.ops.aten.div.Tensor


def value_of(tensor: torch.Tensor) -> torch.Tensor:
    found = known(tensor)
    assert found is not None
    return found


@pytest.mark.parametrize(("tokens", "is_computed"), [(64, True), (4096, True), (4097, False)])
def test_a_mask_over_too_many_tokens_is_not_computed(tokens: int, is_computed: bool) -> None:
    queries, keys = torch.arange(tokens).view(-1, 1), torch.arange(tokens).view(1, -1)
    with FakeTensorMode():
        inputs = [torch.empty(values.shape, dtype=values.dtype) for values in (queries, keys)]
        mask = _NOT_BEFORE(*inputs)
    for tensor, values in zip(inputs, (queries, keys), strict=True):
        set_known(tensor, values)

    found = Knowledge().compute(_NOT_BEFORE, tuple(inputs), {}, inputs, mask)

    assert (found is not None) is is_computed
    if found is not None:
        set_known(mask, found)
        assert torch.equal(value_of(mask), queries >= keys)


def test_floating_point_results_are_computed_where_they_are_a_single_number() -> None:
    for count in (1, 2):
        values = torch.arange(count)
        with FakeTensorMode():
            given = torch.empty(count, dtype=torch.int64)
            halved = _HALVED(given, 2)
        set_known(given, values)
        assert (Knowledge().compute(_HALVED, (given, 2), {}, [given], halved) is not None) is (count == 1)


@pytest.mark.parametrize("reads", [True, False])
def test_a_router_is_assumed_to_be_balanced_where_its_choice_is_read(reads: bool) -> None:
    """Sampling from the 50 likeliest tokens calls ``topk`` too, and reads no index."""
    found: list[list[int]] = []

    def choose(device: torch.device) -> None:
        scores, experts = torch.empty(2, 4, device=device).topk(2)
        scores.sum()
        if reads:
            found.append(experts.flatten().tolist())

    assumed = trace(choose).assumptions
    assert found == ([[0, 1, 2, 3]] if reads else [])
    assert assumed == ({"a router spreads its tokens evenly over the experts": 1} if reads else {})


MANY = 5000


def found_by(step: Callable[[torch.Tensor], torch.Tensor]) -> list[int] | None:
    """Return the known values of a traced step's results on the numbers up to MANY."""
    found: list[list[int] | None] = []

    def run(device: torch.device) -> None:
        made = step(trace_inputs(np.arange(MANY)))
        value = known(made)
        found.append(value.tolist() if value is not None else None)

    trace(run, target="cpu")
    return found[0]


def doubled_before_it_is_overwritten(numbers: torch.Tensor) -> torch.Tensor:
    doubled = numbers * 2
    numbers.add_(1)
    return doubled


def last_of_what_is_overwritten(numbers: torch.Tensor) -> torch.Tensor:
    part = numbers[MANY // 2 :]
    numbers.add_(1)
    return part


def overwritten_through_a_part(numbers: torch.Tensor) -> torch.Tensor:
    more = numbers + 1
    more[MANY // 2 :].fill_(7)
    return more


def overwritten_by_data(numbers: torch.Tensor) -> torch.Tensor:
    part = numbers[1:]
    numbers.copy_(torch.empty(MANY))
    return part


def doubled_before_it_is_overwritten_by_data(numbers: torch.Tensor) -> torch.Tensor:
    doubled = numbers * 2
    numbers.copy_(torch.empty(MANY))
    return doubled


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (doubled_before_it_is_overwritten, list(range(0, 2 * MANY, 2))),
        (last_of_what_is_overwritten, list(range(MANY // 2 + 1, MANY + 1))),
        (overwritten_through_a_part, [*range(1, MANY // 2 + 1), *[7] * (MANY // 2)]),
        (overwritten_by_data, None),
        (doubled_before_it_is_overwritten_by_data, list(range(0, 2 * MANY, 2))),
    ],
)
def test_many_values_are_those_of_the_time_at_which_the_operator_ran(
    step: Callable[[torch.Tensor], torch.Tensor], expected: list[int] | None
) -> None:
    assert found_by(step) == expected


def test_known_values_are_listed() -> None:
    def run(device: torch.device) -> None:
        numbers = trace_inputs(np.arange(MANY)).view(2, -1)
        assert numbers.tolist() == np.arange(MANY).reshape(2, -1).tolist()

    trace(run, target="cpu")


def test_a_tensor_is_made_of_known_numbers() -> None:
    def run(device: torch.device) -> None:
        numbers = trace_inputs(np.arange(MANY))
        made = torch.tensor([numbers.max() + 1, numbers.min()], device=device)
        assert made.tolist() == [MANY, 0]
        assert made.dtype == torch.int64

    trace(run, target="cpu")


def test_images_that_are_all_zeros_are_told_from_others() -> None:
    """As Idefics 3 leaves out those that its processor has added."""

    def run(device: torch.device) -> None:
        images = trace_inputs(np.repeat(np.array([1, 0, 2], np.float32), MANY).reshape(3, -1)).to(torch.bfloat16)
        assert images[(images == 0.0).sum(dim=1) != MANY].shape == (2, MANY)
        # As TRL's GRPO takes a generation batch apart, where each completion has one image.
        again = torch.cat(torch.split(images, [2, 1]))
        assert again[(again == 0.0).sum(dim=1) != MANY].shape == (2, MANY)

    trace(run, target="cpu")


def placed_after_a_trace() -> str:
    def run(device: torch.device) -> None:
        with torch.device("cpu"):
            torch.ones(2)

    trace(run, target="cpu")
    with torch.device("meta"):
        return str(torch.tensor([]).device)


def test_after_a_trace_a_context_of_a_device_still_places_new_tensors(job_server: JobServer) -> None:
    assert apart(job_server, placed_after_a_trace) == "meta"
