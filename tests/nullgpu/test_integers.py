"""Integers and small tensors, on which programs branch, are computed on the host."""

from __future__ import annotations

from typing import Any

import pytest

from tests.nullgpu.machine import NEEDS_CUDA_BUILD, NullMachine

pytestmark = NEEDS_CUDA_BUILD

PROGRAM = """
    import json, torch
    a = torch.arange(10, device="cuda")
    mask = a % 3 == 0
    b = torch.zeros(10, 2, device="cuda")
    b[mask] = 2.5
    scores = torch.randn(4, 100, device="cuda")
    large = torch.ones(1 << 20, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    large.sum()
    empty, torch.empty = torch.empty, None  # DeepSpeed's zero.Init replaces it
    halves = (torch.arange(6, device="cuda").to(torch.bfloat16) / 2)[1::2].tolist()
    torch.empty = empty
    print(json.dumps({
        "halves": halves,
        "indices": a[mask].tolist(), "count": mask.sum().item(), "nonzero": list(torch.nonzero(mask).shape),
        "cumsum": a.cumsum(0).tolist(), "all": bool((a >= 0).all()), "mean": a.float().mean().item(),
        "rows": b.sum(1).tolist(), "unique": torch.cat([a, a]).unique().tolist(),
        "power": torch.full((2,), 9.0, device="cuda").pow(0.5).tolist(),
        "power of a number": (2.0 ** torch.arange(3.0, device="cuda")).tolist(),
        "norm": torch.linalg.vector_norm(torch.tensor([3.0, 4.0], device="cuda")).item(),
        "first": mask.int().argmax().item(),
        "argmax": scores.argmax(-1).tolist(), "drawn": torch.multinomial(scores.softmax(-1), 1).flatten().tolist(),
        "sum allocates": torch.cuda.memory_allocated() - before,
    }))
"""


# ZeRO's tests of gradients before an update, which reduce each and ask whether the number is finite.
TESTS = """
    import json, torch
    def found(numbers):
        return bool(torch.isfinite(numbers.amax()) & torch.isfinite(numbers).all() & torch.isfinite(numbers.norm())
            & ~torch.isnan(numbers).any() & ~torch.isinf(numbers).any())
    small = torch.tensor([1.0, float("nan"), float("inf")], device="cuda")
    large = torch.empty(1 << 20, device="cuda")
    huge = torch.empty(1 << 23, device="cuda", dtype=torch.bfloat16)
    norms = torch._foreach_norm([large, huge])
    print(json.dumps({
        "finite": [found(each) for each in (small, large, huge)],
        "negative": [bool(each.norm() < 0) for each in (small, large, huge)] + [bool(each < 0) for each in norms],
        "integers": torch.isnan(torch.arange(3, device="cuda")).tolist(),
        "on the host": torch.isnan(small.cpu()).tolist(),
    }))
"""

# Memory that is used again holds numbers that are no index of anything, and no row's order may depend on the draws.
USED = """
    import json, torch
    def used(count):
        for each in [torch.full((1 << 15,), 1 << 40, device="cuda") for _ in range(count)]:
            del each
    used(16)
    scores = torch.randn(1 << 14, 8, device="cuda")
    indices = torch.topk(scores, 2).indices
    counts = torch.zeros(1 << 14, 8, dtype=torch.long, device="cuda").scatter_(1, indices, 1).sum().item()
    torch.manual_seed(0)
    drawn = torch.randint(3, 9, (64,), device="cuda").tolist()
    order = torch.randperm(64, device="cuda").tolist()
    share = torch.rand(64, device="cuda").tolist()
    of_rows = torch.rand(1).item()
    print(json.dumps({
        "indices": [indices.min().item(), indices.max().item()], "counts": counts,
        "drawn": [min(drawn), max(drawn)], "order": sorted(order), "share": [min(share), max(share)],
        "rows": of_rows == torch.rand(1, generator=torch.Generator().manual_seed(0)).item(),
        "loss": torch.tensor(float("nan"), device="cuda").item(),
    }))
"""


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What a process prints that runs all."""
    return NullMachine(tmp_path_factory.mktemp("computed") / "table").run_all(PROGRAM, TESTS, USED)


def test_integers_and_small_tensors_are_computed_and_what_is_drawn_from_other_numbers_is_the_last(
    computed: list[Any],
) -> None:
    shown = computed[0]
    assert shown["indices"] == [0, 3, 6, 9]
    assert (shown["count"], shown["nonzero"]) == (4, [4, 1])
    assert shown["cumsum"] == [0, 1, 3, 6, 10, 15, 21, 28, 36, 45]
    assert (shown["all"], shown["mean"]) == (True, 4.5)
    assert shown["rows"] == [5.0, 0, 0, 5.0, 0, 0, 5.0, 0, 0, 5.0]
    assert shown["halves"] == [0.5, 1.5, 2.5]
    assert (shown["power"], shown["norm"]) == ([3.0, 3.0], 5.0)
    assert shown["power of a number"] == [1.0, 2.0, 4.0]
    assert shown["unique"] == list(range(10))
    assert shown["first"] == 0
    assert (shown["argmax"], shown["drawn"]) == ([99] * 4, [99] * 4)


def test_no_gradient_is_taken_for_infinite_so_that_no_update_is_skipped(computed: list[Any]) -> None:
    assert computed[1] == {
        "finite": [True] * 3,
        "negative": [False] * 5,
        "integers": [False] * 3,
        "on the host": [False, True, False],
    }


def test_indices_and_draws_are_within_bounds_and_a_loss_is_finite(computed: list[Any]) -> None:
    found = computed[2]
    assert (found["indices"], found["counts"]) == ([0, 0], 1 << 14)
    assert 3 <= found["drawn"][0] <= found["drawn"][1] < 9
    assert found["order"] == list(range(64))
    assert 0 <= found["share"][0] <= found["share"][1] < 1
    assert found["rows"]
    assert found["loss"] == 0


COUNT = "import json, torch; print(json.dumps(torch.arange(5, device='cuda').tolist()))"


def test_arithmetic_can_be_left_out(machine: NullMachine) -> None:
    assert machine.run(COUNT, NULLGPU_INTEGERS="0") == [0, 0, 0, 0, 0]


def test_a_command_that_replaces_pythonpath_has_arithmetic(machine: NullMachine) -> None:
    assert machine.run(COUNT, PYTHONPATH="src") == [0, 1, 2, 3, 4]
